"""The words in which kernels are described: below the kernels, which use them, and the planner, which reads them."""

"""What the results of the paper's experiments say, drawn, as in bench/pictures."""

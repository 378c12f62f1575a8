"""What all others stand on: values, checks, errors and faults, code that is kept, and which backend computes."""

"""Other projects' kernels for few rows, and our predicted times beside theirs."""

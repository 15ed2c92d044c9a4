"""What a cell is: its definition, row specs, identity, snapshot of weights, files, checks and compiled form."""

"""Definition of cells: row specs, identity, snapshot of weights, files, checks and compiled forms."""

"""Matrix products on a CPU, as wide as its vectors, with weights packed once: for ready-made cells and users' own."""

"""Language models that people can use: checkpoints as others write them."""

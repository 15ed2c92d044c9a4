"""What a model costs on a device, which load it bears, and how many workers a load needs."""

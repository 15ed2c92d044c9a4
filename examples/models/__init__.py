"""The models that the examples serve. An example finds them as ``models``, because it lies beside them."""

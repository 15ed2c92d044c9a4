"""A trained model served as ``cellrt demo`` does it: spelling to phonemes, beside one-at-a-time and padded batches."""

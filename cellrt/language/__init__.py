"""Language models as people use them: checkpoints, text, answers, conversations."""

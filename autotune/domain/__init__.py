"""The words of the product as frozen values: studies, trials, predictions, best configurations. No I/O."""

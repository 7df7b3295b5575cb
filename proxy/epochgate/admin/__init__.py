"""The second listener: health, metrics, what was decided and why. Nothing of it is on the data port."""

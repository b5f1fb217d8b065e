"""Which samples meet in a batch; a trainer knows of all this only ``Selector``."""

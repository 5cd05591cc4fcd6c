"""How one object is stored: what each way would take, and the layers of the one that was chosen."""

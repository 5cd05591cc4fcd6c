"""Connects ckstore with other libraries, each imported only when it is used."""

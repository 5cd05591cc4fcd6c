"""What connects ckstore with other libraries, each of which is imported when it is used."""

"""windlass behind the interfaces of other loaders, one package for each: change an import, keep the program."""

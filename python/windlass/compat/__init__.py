"""Other libraries' interfaces, with windlass behind them: change an import, keep the program."""

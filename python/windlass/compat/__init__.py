"""Other libraries' interfaces, with windlass behind them."""

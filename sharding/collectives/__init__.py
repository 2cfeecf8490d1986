"""Communication between ranks, except for the experts' rows."""

"""How clients' updates are combined: `tff.aggregators` factories."""

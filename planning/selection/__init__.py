"""How a selection of keys is planned: its arrays, its problem, its plan."""

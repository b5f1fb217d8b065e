"""The objective inside other people's trainers.  A trainer that saves and loads its optimizer then saves and loads the
objective with it: see ``state.carry_state``.  No module here imports the library it is for before it is used."""

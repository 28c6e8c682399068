"""The space of a study, its plan, the next configuration to try, and the winner. Pure; Optuna inside `suggest` only."""

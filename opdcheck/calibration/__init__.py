"""Finding a student's budget by training it: the OPD trainer, the ladder of mismatch levels, the fit."""

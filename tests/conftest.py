"""Being here, this file puts its directory on the import path: every test can ``import tiny``."""

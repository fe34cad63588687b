"""Load damaged and hostile checkpoints by the thousand, and see that each loads or is refused with a typed error.

``python -m fuzz --help`` with this directory's parent on the path; ``make fuzz`` runs it.
"""

"""Uses engines that run elsewhere: in other processes, or wherever messages can be sent."""

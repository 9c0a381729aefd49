"""The scheduler of paged: where requests live, and where people and programs come in."""

"""Everything is read where it stands here, however short it is."""

from helpers_views import short_pieces

__all__ = ["short_pieces"]

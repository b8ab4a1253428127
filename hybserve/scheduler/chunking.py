"""Where a prefill chunk ends. Pure arithmetic on token counts."""


def chunk_end(start: int, fill: int, page_size: int, most: int) -> int:
    """End of the chunk that begins at ``start`` of ``fill`` known tokens and computes at most ``most`` of them.

    A page multiple, or ``fill`` itself. Equal to ``start`` if not even the rest of a page fits.
    """
    if fill - start <= most:
        return fill
    end = start + most
    return max(start, end - end % page_size)

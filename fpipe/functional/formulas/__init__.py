"""Operations of torch written out by others, which go through transforms rightly."""

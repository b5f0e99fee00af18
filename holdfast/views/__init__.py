"""The operator's desk: what every face shows and does alike, whether it prints, answers over HTTP or draws."""

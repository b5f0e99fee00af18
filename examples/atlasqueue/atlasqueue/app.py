"""The application, without handlers: who submits jobs needs none."""

from __future__ import annotations

from atlasqueue import config
from holdfast import Holdfast

app = Holdfast(settings=config.settings())

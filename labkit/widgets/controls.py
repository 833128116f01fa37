"""The controls of the explorers: all of one size, with a label and a tooltip."""

import ipywidgets


def labelled(kind, description: str, tooltip: str, label_width: str = "5.5rem", **options):
    """An ipywidget of a kind, in the explorers' look."""
    style, layout = {"description_width": label_width}, {"width": "22rem"}
    return kind(description=description, tooltip=tooltip, style=style, layout=layout, **options)


def labelled_slider(description: str, tooltip: str, values, value):
    """A slider over the values, shown with a comma for each thousand."""
    options = [(f"{v:,}", v) for v in values]
    return labelled(ipywidgets.SelectionSlider, description, tooltip, options=options, value=value)

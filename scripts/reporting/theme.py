"""One set of colors for figures and page, in a light and a dark form.

Figures are drawn in the light form. In the page, each of their colors becomes a CSS variable.
"""

# name: (light, dark); text colors have a contrast of at least 4.5 to the background
COLORS = {
    "background": ("#fdfdfc", "#15181c"),
    "panel": ("#f3f4f5", "#1e2227"),
    "text": ("#1c2127", "#e4e8ec"),
    "muted": ("#5b6570", "#9aa5b1"),
    "line": ("#d5dade", "#363d45"),
    "series-1": ("#1667c7", "#6aaefb"),
    "series-2": ("#c24a0c", "#ff9b57"),
    "series-3": ("#12794b", "#4fd08c"),
    "series-4": ("#7b3fc4", "#b592ff"),
    "series-5": ("#b3205f", "#ff83b2"),
    "series-6": ("#0d7280", "#48cbdc"),
}
LIGHT = {name: light for name, (light, _) in COLORS.items()}
SERIES = [LIGHT[name] for name in COLORS if name.startswith("series-")]
# Cells of the confusion matrix on both backgrounds: right predictions and mistakes.
RIGHT, WRONG = "#2f80ed", "#e5533d"

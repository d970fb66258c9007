"use strict";
// Draws the page's views (Vega-Lite, in the element `views`) in the colours of a light or a dark page.
(() => {
  const shown = {}, dark = matchMedia("(prefers-color-scheme: dark)");

  async function draw() {
    const style = getComputedStyle(document.documentElement);
    const views = JSON.parse(document.getElementById("views").textContent
      .replace(/var\((--[\w-]+)\)/g, (_, name) => style.getPropertyValue(name).trim()));
    for (const [id, view] of Object.entries(views)) {
      const place = document.getElementById(id);
      if (!place) continue;  // its section is not on this page
      view.params[0].value = place.clientWidth;
      shown[id]?.finalize();
      const renderer = id.startsWith("timeline") ? "canvas" : "svg", theme = dark.matches ? "dark" : "light";
      shown[id] = await vegaEmbed(place, view, {mode: "vega-lite", actions: false, renderer, tooltip: {theme}});
    }
    const timelines = Object.keys(shown).filter(id => id.startsWith("timeline")).map(id => shown[id].view);
    // What is zoomed in one panel of the step is zoomed in all.
    for (const view of timelines)
      view.addSignalListener("zoom_start_s", (name, extent) => timelines.forEach(other => {
        if (JSON.stringify(other.signal(name)) !== JSON.stringify(extent)) other.signal(name, extent).runAsync();
      }));
  }

  function zoom(factor) {
    const {view} = shown["timeline-0"], [from, to] = view.scale("x").domain();
    const half = factor * (to - from) / 2, middle = (from + to) / 2;
    view.signal("zoom_start_s", factor ? [middle - half, middle + half] : null).runAsync();
  }

  document.querySelectorAll("[data-zoom]").forEach(button =>
    button.addEventListener("click", () => zoom({in: 0.5, out: 2, all: 0}[button.dataset.zoom])));
  dark.addEventListener("change", draw);
  window.pictures = shown;
  window.drawn = draw();
})();

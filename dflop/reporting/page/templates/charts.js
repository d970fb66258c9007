"use strict";
// Line charts and scatter plots, drawn into the page's empty <svg class="chart"> from the numbers in the page.
const NUMBERS = JSON.parse(document.getElementById("numbers").textContent);
const MARGIN = {left: 54, right: 12, top: 10, bottom: 36};
const LINES = {
  loss: ["measured", "--measured"], evaluation_loss: ["held-out samples", "--evaluated"],
  tokens_per_s: ["measured", "--measured"], pipeline_s: ["measured", "--measured"],
  predicted_step_s: ["predicted", "--predicted"], idle: ["measured", "--measured"], predicted_idle: ["predicted", "--predicted"],
};
const DOTS = ["--p0", "--p4", "--p1", "--p5", "--p2", "--p6", "--p3"];

function svgElement(parent, name, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  parent.appendChild(made);
  return made;
}

function shortNumber(value) {
  const size = Math.abs(value);
  if (value === 0) return "0";
  if (size >= 1e6) return (value / 1e6).toPrecision(3).replace(/\.?0+$/, "") + "M";
  if (size >= 1e4) return Math.round(value / 1e3) + "k";
  if (size >= 100) return Math.round(value).toString();
  return Number(value.toPrecision(size < 0.01 ? 1 : 3)).toString();
}

function shortSeconds(seconds) {
  if (seconds >= 1) return seconds.toPrecision(3) + " s";
  if (seconds >= 1e-3) return (seconds * 1e3).toPrecision(3) + " ms";
  return (seconds * 1e6).toPrecision(3) + " µs";
}

function linearTicks(low, high, wanted) {
  const raw = (high - low) / wanted || 1, power = 10 ** Math.floor(Math.log10(raw));
  const step = power * ([1, 2, 5, 10].find(own => own * power >= raw) || 10), ticks = [];
  for (let tick = Math.ceil(low / step) * step; tick <= high + step / 1e6; tick += step) ticks.push(tick);
  return ticks;
}

function logTicks(low, high, wanted) {
  let ticks = [];
  for (const factors of [[1, 2, 5], [1, 3], [1]]) {
    ticks = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++)
      for (const factor of factors) {
        const tick = factor * 10 ** power;
        if (tick >= low && tick <= high) ticks.push(tick);
      }
    if (ticks.length <= wanted) break;
  }
  const every = Math.ceil(ticks.length / wanted);
  return ticks.filter((_, place) => place % every === 0);
}

// A frame with axes; returns functions from values to pixels.
function frame(svg, x, y) {
  svg.replaceChildren();
  const width = svg.clientWidth, height = svg.clientHeight;
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  const place = (axis, from, to) => {
    const scale = axis.log ? Math.log : (value => value);
    const low = scale(axis.low), high = scale(axis.high);
    return value => from + (to - from) * (scale(Math.max(value, axis.log ? axis.low : -Infinity)) - low) / (high - low || 1);
  };
  const atX = place(x, MARGIN.left, width - MARGIN.right), atY = place(y, height - MARGIN.bottom, MARGIN.top);
  const write = axis => axis.percent ? (value => Math.round(100 * value) + "%") : shortNumber;
  const ticks = (axis, wanted) => (axis.log ? logTicks : linearTicks)(axis.low, axis.high, wanted);
  for (const tick of ticks(y, 5)) {
    svgElement(svg, "line", {class: "rule", x1: MARGIN.left, x2: width - MARGIN.right, y1: atY(tick), y2: atY(tick)});
    svgElement(svg, "text", {x: MARGIN.left - 6, y: atY(tick) + 4, "text-anchor": "end"}, write(y)(tick));
  }
  for (const tick of ticks(x, Math.max(3, Math.floor(width / 75))))
    svgElement(svg, "text", {x: atX(tick), y: height - MARGIN.bottom + 16, "text-anchor": "middle"}, write(x)(tick));
  svgElement(svg, "text", {x: width - MARGIN.right, y: height - 4, "text-anchor": "end"}, x.name + (y.name ? `, upwards: ${y.name}` : ""));
  return [atX, atY];
}

// Names of what is drawn, in a line above the chart.
function names(svg, entries) {
  const own = svg.previousElementSibling && svg.previousElementSibling.classList.contains("legend")
    ? svg.previousElementSibling : svg.parentNode.insertBefore(document.createElement("ul"), svg);
  own.className = "legend";
  own.replaceChildren(...entries.map(([name, colour]) => {
    const item = document.createElement("li"), sign = document.createElement("i");
    sign.style.background = `var(${colour})`;
    item.append(sign, name);
    return item;
  }));
}

function drawLines(svg) {
  const curves = NUMBERS.curves, steps = curves.step;
  const drawn = svg.dataset.lines.split(" ").filter(name => curves[name] && curves[name].some(value => value !== null));
  const values = drawn.flatMap(name => curves[name]).filter(value => value !== null).sort((a, b) => a - b);
  if (!values.length) return;
  // A few slow first steps would flatten all others: they leave the axis.
  const usual = values[Math.floor(0.95 * (values.length - 1))], largest = values[values.length - 1];
  const high = (largest > 2 * usual && svg.dataset.fromZero ? 1.25 * usual : largest) * (largest > 0 ? 1.06 : 1);
  const low = svg.dataset.fromZero ? 0 : values[0] - 0.06 * (high - values[0]);
  const [atX, atY] = frame(svg,
    {low: steps[0], high: steps[steps.length - 1] || 1, name: "step"}, {low, high, percent: svg.dataset.percent});
  for (const name of drawn) {
    const points = steps.map((step, place) => [step, curves[name][place]]).filter(([, value]) => value !== null);
    const path = points.map(([step, value]) => `${atX(step).toFixed(1)},${atY(Math.min(value, high)).toFixed(1)}`).join(" ");
    const style = `fill: none; stroke: var(${LINES[name][1]}); stroke-width: 1.6;` + (name.startsWith("predicted") ? " stroke-dasharray: 5 3" : "");
    if (points.length > 1) svgElement(svg, "polyline", {points: path, style});
    if (points.length < 12)
      for (const [step, value] of points) svgElement(svg, "circle", {cx: atX(step), cy: atY(value), r: 3, style: `fill: var(${LINES[name][1]})`});
  }
  names(svg, drawn.map(name => LINES[name]).concat(largest > high ? [[`largest: ${shortNumber(largest)}`, "--line"]] : []));
  svg.onmousemove = event => {
    const at = event.clientX - svg.getBoundingClientRect().left;
    const nearest = steps.reduce((best, step, place) => Math.abs(atX(step) - at) < Math.abs(atX(steps[best]) - at) ? place : best, 0);
    const write = value => svg.dataset.percent ? (100 * value).toFixed(1) + "%" : shortNumber(value);
    showTip(event, [`step ${steps[nearest]}`, ...drawn.filter(name => curves[name][nearest] !== null).map(name => `${LINES[name][0]}: ${write(curves[name][nearest])}`)]);
  };
  svg.onmouseleave = hideTip;
}

function drawScatter(svg) {
  const groups = Object.entries(NUMBERS[svg.dataset.scatter]), all = groups.flatMap(([, dots]) => dots);
  if (!all.length) return;
  const present = place => all.map(dot => dot[place]).filter(value => value > 0);
  const limits = place => [Math.min(...present(place)), Math.max(...present(place))];
  let [x, y] = [limits(0), limits(1)];
  if (svg.dataset.diagonal) x = y = [Math.min(x[0], y[0]), Math.max(x[1], y[1])];
  const axis = (own, name) => ({low: own[0] / 1.25, high: own[1] * 1.25, log: true, name});
  const [atX, atY] = frame(svg, axis(x, svg.dataset.x), axis(y, svg.dataset.y));
  if (svg.dataset.diagonal)
    svgElement(svg, "line", {class: "rule", x1: atX(x[0]), y1: atY(x[0]), x2: atX(x[1]), y2: atY(x[1])});
  if (all.some(([own]) => own === 0)) svgElement(svg, "text", {x: MARGIN.left + 4, y: svg.clientHeight - 4}, "at the left edge: none");
  groups.forEach(([, dots], number) => {
    for (const [own, other] of dots)
      svgElement(svg, "circle", {cx: atX(own).toFixed(1), cy: atY(other).toFixed(1), r: 2.6, style: `fill: var(${DOTS[number % DOTS.length]}); opacity: 0.65`});
  });
  names(svg, groups.map(([name], number) => [name, DOTS[number % DOTS.length]]));
}

function showTip(event, lines) {
  const tip = document.getElementById("tip");
  tip.replaceChildren(...lines.flatMap(line => [document.createTextNode(line), document.createElement("br")]));
  tip.hidden = false;
  const left = Math.min(event.clientX + 14, window.innerWidth - tip.offsetWidth - 8);
  const below = event.clientY + 18 + tip.offsetHeight < window.innerHeight;
  tip.style.left = Math.max(4, left) + "px";
  tip.style.top = (below ? event.clientY + 18 : event.clientY - tip.offsetHeight - 10) + "px";
}

function hideTip() {
  document.getElementById("tip").hidden = true;
}

function drawCharts() {
  document.querySelectorAll("[data-lines]").forEach(drawLines);
  document.querySelectorAll("[data-scatter]").forEach(drawScatter);
}
drawCharts();
window.addEventListener("resize", drawCharts);

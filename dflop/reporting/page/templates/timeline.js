// The timeline of one step: a canvas a panel, all with one extent that is zoomed and moved.
(() => {
  const {rows, modules, passes, num_chunks: numChunks, replicas, loads, panels} = NUMBERS.timeline;
  const room = document.getElementById("timeline"), extent = document.getElementById("extent");
  const whole = Math.max(...panels.map(panel => panel.step_s)) * 1.02;
  const ROW = rows.length > 12 ? 17 : 24, AXIS = 20, LEAST_SHARE = 1e-4;
  let [from, to] = [0, whole], style, narrow = false, labels = 0, written = rows;

  const colourOf = (module, pass) => {
    if (pass === "sync" || pass === "weight") return style.getPropertyValue("--" + pass);
    const name = ["vision", "audio", "llm"].includes(modules[module]) ? modules[module] : "audio";
    return style.getPropertyValue(pass === "forward" ? `--${name}-light` : `--${name}`);
  };

  const canvases = panels.map(panel => {
    const title = document.createElement("h3"), canvas = document.createElement("canvas"), mark = document.createElement("span");
    mark.className = "mark " + (panel.measured ? "measured" : "predicted");
    mark.textContent = panel.measured ? "measured" : "predicted";
    title.append(mark, " " + panel.title.replace(/, (measured|predicted):/, ":"));
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", panel.title);
    room.append(title, canvas);
    return canvas;
  });

  const at = seconds => labels + (canvases[0].clientWidth - labels) * (seconds - from) / (to - from);
  const secondsAt = pixel => from + (to - from) * (pixel - labels) / (canvases[0].clientWidth - labels);

  function shown(pen, text, most) {
    let short = text;
    while (short.length > 3 && pen.measureText(short).width > most) short = short.slice(0, -2).trimEnd() + "…";
    return short;
  }

  function drawPanel(panel, canvas) {
    const width = room.clientWidth, height = rows.length * ROW + AXIS, ratio = window.devicePixelRatio || 1;
    canvas.style.height = height + "px";
    canvas.width = width * ratio;
    canvas.height = height * ratio;
    const pen = canvas.getContext("2d");
    pen.scale(ratio, ratio);
    pen.font = "11px system-ui, sans-serif";
    pen.textBaseline = "middle";
    const ends = Math.min(at(panel.step_s), width), starts = Math.max(labels, at(0));
    pen.fillStyle = style.getPropertyValue("--wait");
    rows.forEach((_, row) => { if (ends > starts) pen.fillRect(starts, row * ROW + 2, ends - starts, ROW - 4); });
    for (const [row, module, chunk, pass, microbatch, start, end] of panel.boxes) {
      const left = Math.max(labels, at(start)), right = Math.min(width, at(end));
      if (right <= labels || left >= width) continue;
      const size = Math.max(0.6, right - left - (right - left > 4 ? 1 : 0));
      pen.globalAlpha = numChunks > 1 ? 1 - 0.4 * chunk / Math.max(1, numChunks - 1) : 1;
      pen.fillStyle = colourOf(module, passes[pass]);
      pen.fillRect(left, row * ROW + 2, size, ROW - 4);
      pen.globalAlpha = 1;
      if (microbatch >= 0 && size > 9 + 6 * String(microbatch).length) {
        const isDarkScheme = matchMedia("(prefers-color-scheme: dark)").matches;
        pen.fillStyle = passes[pass] === "forward" ? (isDarkScheme ? "#e8eaed" : "#1c1e21") : "#ffffff";
        pen.textAlign = "center";
        pen.fillText(microbatch, left + size / 2, row * ROW + ROW / 2 + 0.5);
      }
    }
    pen.strokeStyle = pen.fillStyle = style.getPropertyValue("--ink");
    if (ends >= labels && at(panel.step_s) <= width) pen.fillRect(Math.round(ends), 0, 1.5, rows.length * ROW);
    pen.fillStyle = style.getPropertyValue("--page");
    pen.fillRect(0, 0, labels, height);
    pen.fillStyle = style.getPropertyValue("--ink");
    pen.textAlign = "left";
    written.forEach((label, row) => pen.fillText(shown(pen, label, labels - 8), 0, row * ROW + ROW / 2 + 0.5));
    pen.fillStyle = style.getPropertyValue("--muted");
    for (const tick of linearTicks(from, to, Math.max(2, Math.floor((width - labels) / 90)))) {
      const place = at(tick), text = tick ? shortSeconds(tick) : "0";
      pen.textAlign = place > width - 28 ? "right" : place < labels + 20 ? "left" : "center";
      pen.fillText(text, Math.min(place, width), rows.length * ROW + AXIS / 2 + 1);
    }
  }

  function draw() {
    style = getComputedStyle(document.documentElement);
    narrow = room.clientWidth < 600;
    const pen = canvases[0].getContext("2d");
    pen.font = "11px system-ui, sans-serif";
    // What all rows begin with says nothing where there is little room.
    const first = rows[0].split(" · ")[0] + " · ", isCommon = narrow && rows.every(row => row.startsWith(first));
    written = isCommon ? rows.map(row => row.slice(first.length)) : rows;
    const longest = Math.max(...written.map(row => pen.measureText(row).width)) + 10;
    labels = Math.min(longest, room.clientWidth * (narrow ? 0.33 : 0.22));
    panels.forEach((panel, number) => drawPanel(panel, canvases[number]));
    extent.textContent = `${shortSeconds(to - from)} of ${shortSeconds(whole)}`;
  }

  function move(newFrom, newTo) {
    const span = Math.min(whole, Math.max(whole * LEAST_SHARE, newTo - newFrom));
    from = Math.min(Math.max(0, newFrom), whole - span);
    to = from + span;
    draw();
  }

  const zoom = (factor, around = (from + to) / 2) => move(around - (around - from) * factor, around + (to - around) * factor);

  function boxAt(panel, canvas, event) {
    const area = canvas.getBoundingClientRect();
    const seconds = secondsAt(event.clientX - area.left), row = Math.floor((event.clientY - area.top) / ROW);
    if (event.clientX - area.left < labels) return undefined;
    return panel.boxes.find(box => box[0] === row && box[5] <= seconds && seconds <= box[6]);
  }

  function describe(panel, [row, module, , pass, microbatch, start, end]) {
    const name = modules[module], replica = replicas[row][name];
    const lines = [rows[row], microbatch < 0 ? "gradient sync" : `${name} ${passes[pass]} of microbatch ${microbatch}`];
    lines.push(`${shortSeconds(end - start)}, from ${start ? shortSeconds(start) : "0"} on`);
    const load = panel.has_loads && microbatch >= 0 ? loads[`${name}/${replica}/${microbatch}`] : undefined;
    if (load) lines.push(`${load[0]} sample${load[0] === 1 ? "" : "s"}, ${load[1].toLocaleString("en")} ${name === "llm" ? "tokens" : "items"}`);
    return lines;
  }

  canvases.forEach((canvas, number) => {
    const pointers = new Map();
    canvas.addEventListener("pointerdown", event => {
      pointers.set(event.pointerId, event.clientX);
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", event => {
      const before = pointers.get(event.pointerId);
      if (before === undefined) {
        const box = boxAt(panels[number], canvas, event);
        return box ? showTip(event, describe(panels[number], box)) : hideTip();
      }
      hideTip();
      const area = canvas.getBoundingClientRect().left;
      if (pointers.size === 2) {
        const other = [...pointers].find(([id]) => id !== event.pointerId)[1];
        const factor = Math.abs(other - before) / Math.max(8, Math.abs(other - event.clientX));
        zoom(factor, secondsAt((other + event.clientX) / 2 - area));
      } else {
        const shift = secondsAt(before - area) - secondsAt(event.clientX - area);
        move(from + shift, to + shift);
      }
      pointers.set(event.pointerId, event.clientX);
      return undefined;
    });
    for (const name of ["pointerup", "pointercancel"]) {
      canvas.addEventListener(name, event => {
        pointers.delete(event.pointerId);
        const box = event.pointerType === "touch" && boxAt(panels[number], canvas, event);
        if (box) showTip(event, describe(panels[number], box));
      });
    }
    canvas.addEventListener("pointerleave", hideTip);
    canvas.addEventListener("wheel", event => {
      if (!event.ctrlKey && !event.metaKey) return;
      event.preventDefault();
      zoom(event.deltaY > 0 ? 1.25 : 0.8, secondsAt(event.clientX - canvas.getBoundingClientRect().left));
    }, {passive: false});
  });
  document.querySelectorAll("[data-zoom]").forEach(button => button.addEventListener("click", () => {
    if (button.dataset.zoom === "all") move(0, whole);
    else zoom(button.dataset.zoom === "in" ? 0.5 : 2);
  }));
  room.addEventListener("keydown", event => {
    const shift = (to - from) / 5;
    const actions = {"+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), ArrowLeft: () => move(from - shift, to - shift), ArrowRight: () => move(from + shift, to + shift)};
    if (!actions[event.key]) return;
    event.preventDefault();
    actions[event.key]();
  });

  const used = new Set(panels.flatMap(panel => panel.boxes.map(box => passes[box[3]] === "sync" || passes[box[3]] === "weight" ? passes[box[3]] : `${modules[box[1]]} ${passes[box[3]]}`)));
  document.getElementById("timeline-legend").replaceChildren(...[...used].sort().map(name => {
    const item = document.createElement("li"), sign = document.createElement("i"), [module, pass] = name.split(" ");
    const known = ["vision", "audio", "llm"].includes(module) ? module : "audio";
    sign.style.background = `var(--${pass === "forward" ? known + "-light" : pass ? known : module})`;
    item.append(sign, {sync: "gradient sync", weight: "weight gradients"}[name] || name);
    return item;
  }));
  draw();
  window.addEventListener("resize", draw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
})();

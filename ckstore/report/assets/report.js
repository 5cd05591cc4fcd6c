// Draws a report from the JSON in the page. Text of the store is untrusted: it becomes text nodes and attributes, never
// markup. Nothing here requests anything; the policy of the page would refuse it.
"use strict";
(() => {
  const SVG = "http://www.w3.org/2000/svg";

  // Viridis at nine places: its lightness rises evenly, so it reads in grey and without colour vision.
  const VIRIDIS = ["440154", "472d7b", "3b528b", "2c728e", "21918c", "28ae80", "5ec962", "addc30", "fde725"];

  // Each line has a colour of the style sheet and a dash, so that lines differ without colour, too.
  const DASHES = [[], [7, 4], [2, 3], [9, 3, 2, 3], [5, 2], [1, 2]];

  const LABELS = { weight: "weights", "first moment": "first moments", "second moment": "second moments", other: "others" };
  const METRICS = 4;  // Plots and rows that are shown at first.
  const TABLE_ROWS = 100;
  const SELECTED_MOST = 6;
  const FENCE = 4;  // Interquartile ranges beyond the quartiles at which a value is an outlier of an axis.

  const dark = matchMedia("(prefers-color-scheme: dark)");
  let redraws = [];  // Called where the width or the theme changes.
  let data, runs, at, steps, selected, measure, heat, tooltip;

  // --- Elements ---------------------------------------------------------------------------------------------------

  function element(tag, attributes = {}, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
      else if (value !== null && value !== false) made.setAttribute(name, value === true ? "" : value);
    }
    made.append(...children.filter((child) => child !== null));
    return made;
  }

  function drawing(tag, attributes, text) {
    const made = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    if (text !== undefined) made.textContent = text;
    return made;
  }

  function section(id, title, about, ...children) {
    return element("section", { id, "aria-labelledby": `${id}-title` },
      element("h2", { id: `${id}-title` }, title), about ? element("p", { class: "about" }, about) : null, ...children);
  }

  function choice(label, options, value, change) {
    const select = element("select", { "aria-label": label, onchange: () => change(select.value) },
      ...options.map(([key, text]) => element("option", { value: key, selected: key === value }, text)));
    return element("label", { class: "choice" }, `${label} `, select);
  }

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const hue = (place) => colour(`--hue-${place % DASHES.length}`);
  const dash = (place) => DASHES[place % DASHES.length];

  // --- Numbers and names ------------------------------------------------------------------------------------------

  function number(value) {
    if (value === null || value === undefined || Number.isNaN(value)) return "–";
    if (typeof value !== "number" || !Number.isFinite(value)) return String(value);
    if (value === 0) return "0";
    const size = Math.abs(value);
    if (size >= 1e6 || size < 1e-3) return value.toExponential(2).replace(/\.?0*e\+?/, "e");
    return Number.isInteger(value) ? value.toLocaleString("en") : String(Number(value.toPrecision(4)));
  }

  function bytes(value) {
    const units = ["B", "kB", "MB", "GB", "TB"];
    let unit = 0;
    for (; value >= 999.5 && unit < units.length - 1; unit++) value /= 1000;
    return `${unit && value < 9.95 ? value.toFixed(1) : Math.round(value)} ${units[unit]}`;
  }

  const plural = (count, noun) => `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;

  // The ends of a path say more than its middle.
  function short(text, most = 40) {
    if (text.length <= most) return text;
    const head = Math.floor((most - 1) * 0.4);
    return `${text.slice(0, head)}…${text.slice(text.length - (most - 1 - head))}`;
  }

  // The quantile of sorted numbers.
  function quantile(sorted, share) {
    const place = (sorted.length - 1) * share;
    const low = Math.floor(place);
    return sorted[low] + (place - low) * (sorted[Math.min(low + 1, sorted.length - 1)] - sorted[low]);
  }

  function sort(values) {
    return Float64Array.from(values).sort();
  }

  function name(run, place) {
    const version = run.versions[place];
    const tags = version.tags.length ? `, ${version.tags.join(", ")}` : "";
    return `${version.step === null ? "" : `step ${version.step}, `}version ${version.number}${tags}`;
  }

  // Python for the numbers of a tensor: JSON's text is Python's text, too.
  function python(run, path, keys) {
    return `ckstore.open(${JSON.stringify(data.store)}).run(${JSON.stringify(run.name)})`
      + `.statistics(${JSON.stringify(keys)}, [${JSON.stringify(path)}])`;
  }

  // --- Contents ---------------------------------------------------------------------------------------------------

  // Measures are planes of three bytes a number, deflated: see `_compact` in page.py.
  async function unpack(run) {
    const text = atob(run.values.packed);
    const deflated = new Uint8Array(text.length);
    for (let place = 0; place < text.length; place++) deflated[place] = text.charCodeAt(place);
    const stream = new Blob([deflated]).stream().pipeThrough(new DecompressionStream("deflate"));
    const planes = new Uint8Array(await new Response(stream).arrayBuffer());
    const count = planes.length / 3;
    const bits = new Uint32Array(count);
    for (let place = 0; place < count; place++) {
      bits[place] = planes[place] << 8 | planes[count + place] << 16 | planes[2 * count + place] << 24;
    }
    const cells = run.tensors.length * run.versions.length;
    const values = new Float32Array(bits.buffer);
    run.values = {};
    return [values, cells];
  }

  async function read() {
    data = JSON.parse(document.getElementById("contents").textContent);
    runs = data.runs;
    await Promise.all(runs.map(async (run, place) => {
      const keys = run.values.keys;
      const [values, cells] = await unpack(run);
      keys.forEach((key, index) => { run.values[key] = values.subarray(index * cells, (index + 1) * cells); });
      run.place = place;
      run.rows = new Map(run.tensors.map((tensor, index) => [tensor.path, index]));
      run.ridges = new Map(run.histograms.map((found) => [found.tensor, found]));
    }));
    // Steps are the axis where every version has one, and they rise; else versions are counted.
    const rising = (run) => run.versions.every(({ step }, place) =>
      step !== null && (place === 0 || step > run.versions[place - 1].step));
    steps = runs.every(rising);
    at = new Map(runs.map((run) => [run, run.versions.map(({ step, number }, place) =>
      steps ? step : runs.length === 1 ? number : place + 1)]));
    data.measures = data.measures.filter(({ key }) =>
      runs.some((run) => run.values[key] && run.values[key].some((value) => !Number.isNaN(value))));
    measure = data.measures[0] || null;
    selected = new Set(selectedFirst());
  }

  const axis = () => steps ? "step" : runs.length === 1 ? "version" : "version of the run";

  function selectedFirst() {
    const paths = (places) => runs.flatMap((run) => places(run).filter((place) => place !== null).map((place) => run.tensors[place].path));
    const odd = paths((run) => run.findings.map(({ tensor }) => tensor));
    const ridged = paths((run) => run.histograms.map(({ tensor }) => tensor));
    const weights = paths((run) => run.tensors.map(({ role }, place) => role === "weight" ? place : null));
    // The first odd one, and one whose distribution is known.
    return [...odd.slice(0, 1), ...(ridged.includes(odd[0]) ? [] : ridged.length ? ridged : weights).slice(0, 1)];
  }

  const history = (run, key, row) => row === undefined || !run.values[key]
    ? new Float32Array(run.versions.length).fill(NaN)
    : run.values[key].subarray(row * run.versions.length, (row + 1) * run.versions.length);

  // --- Lines ------------------------------------------------------------------------------------------------------

  // The range of an axis without outliers, and how many values it leaves out.
  function robust(values, log) {
    const sorted = sort(log ? values.map(Math.log10) : values);
    const [low, high] = [quantile(sorted, 0.25), quantile(sorted, 0.75)];
    const reach = FENCE * (high - low) || Infinity;
    const inside = sorted.filter((value) => value >= low - reach && value <= high + reach);
    let range = [inside[0], inside[inside.length - 1]];
    const whole = [sorted[0], sorted[sorted.length - 1]];
    const ruined = whole[1] - whole[0] > 3 * (range[1] - range[0]);
    if (!ruined) range = whole;
    return [log ? range.map((value) => 10 ** value) : range, ruined ? sorted.length - inside.length : 0];
  }

  function padded([low, high], log) {
    if (log) {
      const margin = Math.max((Math.log10(high) - Math.log10(low)) * 0.06, 0.05);
      return [low / 10 ** margin, high * 10 ** margin];
    }
    const margin = (high - low) * 0.06 || Math.abs(high) * 0.05 || 1;
    return [low - margin, high + margin];
  }

  // Round numbers on a logarithmic axis: powers of ten, with twice and five times them where there is room.
  function logTicks(low, high) {
    const ticks = [];
    const room = Math.log10(high / low);
    if (room < 0.7) {
      const step = 10 ** Math.floor(Math.log10(high - low)) * ((high - low) / 10 ** Math.floor(Math.log10(high - low)) > 4 ? 2 : 1);
      for (let tick = Math.ceil(low / step); tick * step <= high; tick++) ticks.push(tick * step);
      return ticks;
    }
    const every = Math.ceil(room / 8);
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) {
      for (const factor of room < 2.5 ? [1, 2, 5] : [1]) {
        const tick = Number(`${factor}e${power}`);
        if (tick >= low && tick <= high && power % every === 0) ticks.push(tick);
      }
    }
    return ticks;
  }

  // Lines over steps: each of `series` has a label, xs, ys, and perhaps colour, dash and the series it fills down to.
  function lines(title, series, { log = false, zero = false, format = number, height = 220 } = {}) {
    log &&= series.some(({ ys }) => ys.some((value) => value > 0));  // A tensor that never moves has zeros alone.
    const shown = series.map((one) => ({ ...one, ys: Array.from(one.ys, (value) =>
      typeof value === "number" && Number.isFinite(value) && (!log || value > 0) ? value : null) }));
    const values = shown.flatMap(({ ys }) => ys.filter((value) => value !== null));
    const box = element("div", { class: "plot", role: "group", "aria-label": title });
    const heading = element("div", { class: "heading" }, element("h3", {}, title));
    const place = element("div", { class: "canvas" });
    box.append(heading, place);
    if (!values.length) {
      place.append(element("p", { class: "empty" }, "No finite numbers."));
      return box;
    }
    const extremes = values.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, -Infinity]);
    const [narrow, left] = zero ? [extremes, 0] : robust(values, log);
    let full = left === 0;
    const range = () => {
      const [low, high] = padded(full ? extremes : narrow, log);
      return zero && !log ? [Math.min(0, extremes[0]), high] : [low, high];
    };
    let plot = null;
    if (left) {
      const toggle = element("input", { type: "checkbox", onchange: () => { full = toggle.checked; make(); } });
      heading.append(element("label", { class: "choice" }, toggle, ` full range (${plural(left, "outlier")})`));
    }
    const make = () => {
      if (plot) plot.destroy();
      const table = uPlot.join(shown.map(({ xs, ys }) => [xs, ys]));
      const stroke = () => colour("--muted");
      const grid = { stroke: () => colour("--line"), width: 1 };
      const fills = shown.flatMap(({ fillTo }, index) => fillTo === undefined ? [] : [{ series: [index + 1, fillTo + 1], fill: `${hue(shown[index].hue)}30` }]);
      plot = new uPlot({
        width: Math.max(place.clientWidth, 200), height, bands: fills,
        cursor: { y: false, points: { size: 7 } },
        scales: { x: { time: false, range: (_, low, high) => low === high ? [low - 1, high + 1] : [low, high] },
          y: { range, distr: log ? 3 : 1 } },
        axes: [{ stroke, grid, ticks: grid, size: 34, values: (_, splits) => splits.map((value) => Number.isInteger(value) ? number(value) : "") },
          { stroke, grid, ticks: grid, size: 62, values: (_, splits) => splits.map(format), 
            ...(log ? { splits: (_, __, low, high) => logTicks(low, high), filter: (_, splits) => splits } : {}) }],
        series: [{ label: axis(), value: (_, value) => number(value) },
          ...shown.map((one) => ({ label: short(one.label, 34), stroke: hue(one.hue), dash: dash(one.dash ?? one.hue), width: 1.75, spanGaps: true,
            points: { show: one.xs.length <= 40, size: 4, fill: hue(one.hue) }, value: (_, value) => value === null ? "–" : format(value) }))],
      }, table, place);
      const made = plot;
      requestAnimationFrame(() => made.setLegend({ idx: table[0].length - 1 }));
    };
    redraws.push({ box, draw: make });
    return box;
  }

  // --- Top --------------------------------------------------------------------------------------------------------

  function header() {
    const tiles = runs.map((run) => {
      const { files, stored } = run.sizes;
      const last = run.versions[run.versions.length - 1];
      const range = last && steps ? `steps ${number(run.versions[0].step)} to ${number(last.step)}` : null;
      const facts = [plural(run.versions.length, "version"), plural(run.tensors.length, "tensor"), range,
        `${bytes(files)} of files in ${bytes(stored)}${stored ? ` (${(files / stored).toFixed(1)} : 1)` : ""}`];
      return element("div", { class: "tile" }, element("h3", { title: run.name }, key(run), short(run.name, 48)),
        element("p", {}, facts.filter(Boolean).join(" · ")));
    });
    const made = `Store ${data.store.split("/").pop()} · ${data.created.slice(0, 16).replace("T", " ")} UTC · ckstore ${data.ckstore}`;
    return element("header", {}, element("h1", { title: data.title }, short(data.title, 90)), element("p", { class: "about" }, made),
      element("div", { class: "tiles" }, ...tiles));
  }

  // The line of a run, as plots have it.
  function key(run) {
    if (runs.length === 1) return "";
    const picture = drawing("svg", { width: 26, height: 10, "aria-hidden": "true", class: "key" });
    const line = drawing("line", { x1: 1, x2: 25, y1: 5, y2: 5, "stroke-width": 2.5, "stroke-dasharray": dash(run.place).join(" ") });
    line.style.stroke = `var(--hue-${run.place % DASHES.length})`;
    picture.append(line);
    return picture;
  }

  function findings() {
    const found = runs.flatMap((run) => run.findings.map((finding) => ({ run, ...finding })));
    if (!found.length) return section("findings", "Findings", null, element("p", { class: "healthy" }, "✓ Nothing odd."));
    return section("findings", "Findings", null, element("ul", { class: "findings" }, ...found.map(({ run, severity, text, tensor }) => {
      const show = tensor === null ? null : element("button", { class: "link", onclick: () => {
        select(run.tensors[tensor].path, true);
        document.getElementById("selected").scrollIntoView();
      } }, "show");
      return element("li", { class: severity }, element("strong", {}, severity === "error" ? "✕ error" : "! warning"),
        element("span", {}, runs.length > 1 ? `${run.name}: ${text}` : text), show);
    })));
  }

  function metrics() {
    const names = [...new Set(runs.flatMap((run) => run.versions.flatMap(({ metrics }) =>
      Object.keys(metrics).filter((name) => typeof metrics[name] === "number"))))];
    if (!names.length) return null;
    names.sort((a, b) => (b === data.metric) - (a === data.metric));
    const plots = (some) => some.map((name) => lines(name, runs.map((run) => ({ label: run.name, hue: run.place, xs: at.get(run),
      ys: run.versions.map(({ metrics }) => metrics[name]) })), { height: 230 }));
    const place = element("div", { class: names.length > 1 ? "pair" : "" }, ...plots(names.slice(0, METRICS)));
    const more = names.length <= METRICS ? null : element("button", { class: "link", onclick: () => {
      more.remove();
      place.append(...plots(names.slice(METRICS)));
      redraw();
    } }, `Show all ${names.length} metrics`);
    return section("metrics", "Metrics", null, place, more);
  }

  // --- Heat maps --------------------------------------------------------------------------------------------------

  const TABLE = (() => {
    const stops = VIRIDIS.map((text) => [0, 2, 4].map((place) => parseInt(text.slice(place, place + 2), 16)));
    const table = new Uint32Array(256);  // Bytes of ImageData: red first, so lowest in a little-endian word.
    for (let place = 0; place < 256; place++) {
      const where = place / 255 * (stops.length - 1);
      const low = Math.min(Math.floor(where), stops.length - 2);
      const [red, green, blue] = stops[low].map((value, part) => Math.round(value + (stops[low + 1][part] - value) * (where - low)));
      table[place] = 0xff000000 | blue << 16 | green << 8 | red;
    }
    return table;
  })();

  // The colours' scale of a measure over all runs: the outer half per cent is clipped, as on other axes.
  function scaleOf(rows) {
    const { key, scale } = measure;
    const log = scale === "log";
    const parts = runs.map((run) => {
      const values = run.values[key], width = run.versions.length;
      const kept = [];
      for (const path of rows) {
        const row = run.rows.get(path);
        if (row === undefined) continue;
        for (let place = row * width; place < (row + 1) * width; place++) {
          if (Number.isFinite(values[place]) && (!log || values[place] > 0)) kept.push(values[place]);
        }
      }
      return kept;
    });
    const sorted = sort(parts.flat());
    if (!sorted.length) return { low: log ? 0.1 : 0, high: 1, log, cut: false };
    const [least, most] = [sorted[0], sorted[sorted.length - 1]];
    let [low, high] = sorted.length < 20 ? [least, most] : [quantile(sorted, 0.005), quantile(sorted, 0.995)];
    if (!log && least >= 0 && most <= 1) [low, high] = [0, 1];  // Shares, mostly.
    if (low === high) [low, high] = log ? [low / 2, high * 2] : [low - 0.5, high + 0.5];
    return { low, high, log, below: least < low, above: most > high };
  }

  function position(value, { low, high, log }) {
    if (log) return value <= 0 ? 0 : Math.log(value / low) / Math.log(high / low);
    return (value - low) / (high - low);
  }

  function layers() {
    if (!measure) {
      return section("layers", "Layers", null, element("p", { class: "empty" }, "There are no numbers of tensors to show."));
    }
    const place = element("div"), about = element("p", { class: "about" });
    const status = element("p", { class: "hidden", "aria-live": "polite" });
    let role = null;
    const controls = element("div", { class: "controls" });
    const draw = () => {
      const some = (run, row) => history(run, measure.key, row).some((value) => !Number.isNaN(value));
      const roles = new Map();
      for (const run of runs) {
        run.tensors.forEach((tensor, row) => { if (some(run, row)) roles.set(tensor.path, tensor.role); });
      }
      const there = [...new Set(roles.values())];
      if (role !== "all" && !there.includes(role)) role = there.includes("weight") ? "weight" : there[0];
      const rows = [...roles.keys()].filter((path) => role === "all" || roles.get(path) === role);
      const groups = { weights: "Weights", optimiser: "Optimiser", storage: "Storage" };
      const tabs = Object.entries(groups).map(([group, title]) => {
        const members = data.measures.filter((one) => one.group === group);
        return members.length ? element("span", { class: "tabs", role: "group", "aria-label": title }, ...members.map((one) =>
          element("button", { "aria-pressed": String(one === measure), title: one.about, onclick: () => { measure = one; heat(); drawSelected(); } }, one.label))) : null;
      });
      const options = [...there.map((one) => [one, LABELS[one] || one]), ...(there.length > 1 ? [["all", "all tensors"]] : [])];
      controls.replaceChildren(...tabs.filter(Boolean), there.length > 1 ? choice("Show", options, role, (value) => { role = value; draw(); }) : "");
      const prefix = common(rows).replace(/[/.]$/, "");
      about.textContent = `${measure.about} ${plural(rows.length, "tensor")}${prefix && ` of ${prefix}`} by ${axis()}; choose one to see more of it. `;
      about.append(element("a", { href: "#measures" }, "Definitions"));
      const scale = scaleOf(rows);
      const panels = element("div", { class: runs.length > 1 ? "panels several" : "panels" }, ...runs.map((run) => panel(run, rows, scale, status)));
      panels.style.setProperty("--runs", runs.length);
      // Rows side by side scroll together.
      panels.addEventListener("scroll", ({ target }) => {
        for (const other of panels.querySelectorAll(".scroll")) other.scrollTop = target.scrollTop;
      }, true);
      place.replaceChildren(legend(scale), panels);
    };
    heat = draw;
    draw();
    return section("layers", "Layers", null, about, controls, place, status);
  }

  // Red through which the hatches show: colour alone says nothing to some.
  const FAULT = 0xa01e26b3;

  function legend({ low, high, log, below, above }) {
    const bar = element("canvas", { width: 256, height: 1, role: "img", "aria-label": `Colours from ${number(low)} to ${number(high)}` });
    bar.getContext("2d").putImageData(new ImageData(new Uint8ClampedArray(TABLE.buffer), 256, 1), 0, 0);
    const middle = log ? Math.sqrt(low * high) : (low + high) / 2;
    return element("div", { class: "legend" },
      element("div", {}, bar, element("div", { class: "ends" }, element("span", {}, (below ? "≤ " : "") + number(low)),
        element("span", {}, number(middle)), element("span", {}, (above ? "≥ " : "") + number(high)))),
      element("span", {}, `${measure.label}, ${log ? "log" : "linear"} scale`),
      element("span", {}, element("i", { class: "hatched" }), " no value"),
      measure.key === "nonfinite" ? null : element("span", {}, element("i", { class: "hatched fault" }), " NaN or infinite"));
  }

  // The parts of a path that all rows begin with.
  function common(rows) {
    let prefix = rows.length > 1 ? rows[0] : "";
    for (const path of rows) while (!path.startsWith(prefix)) prefix = prefix.replace(/[^/.]*[/.]?$/, "");
    return prefix.replace(/[^/.]*$/, "");
  }

  // Rows with a common prefix: as many parts of the paths as leave room for a label at each group.
  function grouped(rows, room) {
    const skipped = common(rows).length;
    const parts = rows.map((path) => path.slice(skipped).match(/[^/.]+[/.]?/g) || [path]);
    const cut = (depth) => {
      const groups = [];
      parts.forEach((words, row) => {
        const label = words.slice(0, depth).join("");
        if (groups.length && groups[groups.length - 1].label === label) groups[groups.length - 1].rows++;
        else groups.push({ label, first: row, rows: 1 });
      });
      return groups;
    };
    let depth = Math.max(1, ...parts.map((words) => words.length));
    while (depth > 1 && cut(depth).length > room) depth--;
    return cut(depth);
  }

  function panel(run, rows, scale, status) {
    const versions = run.versions.length;
    const height = Math.max(1, Math.min(15, Math.floor(480 / Math.max(rows.length, 1))));
    const picture = element("canvas", { class: "heat hatched", width: Math.max(versions, 1), height: Math.max(rows.length, 1), tabindex: 0, role: "img",
      "aria-label": `${measure.label} of ${plural(rows.length, "tensor")} at ${plural(versions, "version")} of ${run.name}. Arrow keys move, Enter chooses a tensor.` });
    const image = new ImageData(picture.width, picture.height);
    const words = new Uint32Array(image.data.buffer);  // Cells without a value stay transparent: hatches show through.
    rows.forEach((path, row) => {
      const values = history(run, measure.key, run.rows.get(path));
      const faults = history(run, "nonfinite", run.rows.get(path));
      for (let place = 0; place < versions; place++) {
        if (faults[place] > 0 && measure.key !== "nonfinite") {
          words[row * picture.width + place] = FAULT;
          continue;
        }
        if (Number.isNaN(values[place])) continue;
        words[row * picture.width + place] = TABLE[Math.max(0, Math.min(255, Math.round(position(values[place], scale) * 255)))];
      }
    });
    picture.getContext("2d").putImageData(image, 0, 0);
    picture.style.height = `${height * rows.length}px`;

    const labels = element("div", { class: "labels", "aria-hidden": "true" });
    for (const group of grouped(rows, height * rows.length / 14)) {
      const label = element("span", { title: group.label }, short(group.label.replace(/[/.]$/, ""), innerWidth > 700 ? 31 : 14));
      label.style.top = `${group.first * height}px`;
      label.style.height = `${group.rows * height}px`;
      if (group.rows * height >= 10) labels.append(label);
    }
    for (const path of selected) {
      const row = rows.indexOf(path);
      if (row < 0) continue;
      const mark = element("b", {}, "▸");
      mark.style.top = `${(row + 0.5) * height}px`;
      labels.append(mark);
    }

    const cursor = element("div", { class: "cursor", hidden: true });
    run.picture = picture;
    const cell = run.cell ||= { row: 0, place: 0 };  // It outlives the picture, which a choice draws again.
    cell.row = Math.min(cell.row, Math.max(0, rows.length - 1));
    const show = (row, place, x, y) => {
      Object.assign(cell, { row, place });
      const index = run.rows.get(rows[row]);
      const text = `${rows[row]}\n${name(run, place)}\n${measure.label}: ${number(index === undefined ? NaN : history(run, measure.key, index)[place])}`;
      Object.assign(cursor.style, { left: `${place / versions * 100}%`, width: `${100 / versions}%`, top: `${row * height}px`, height: `${height}px` });
      cursor.hidden = false;
      tooltip.textContent = text;
      tooltip.hidden = false;
      tooltip.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - tooltip.offsetWidth - 8))}px`;
      tooltip.style.top = `${y + 18 + tooltip.offsetHeight > innerHeight ? y - tooltip.offsetHeight - 12 : y + 18}px`;
      return text;
    };
    const hide = () => { cursor.hidden = tooltip.hidden = true; };
    const over = (event) => {
      const box = picture.getBoundingClientRect();
      const limit = (value, most) => Math.max(0, Math.min(most - 1, Math.floor(value)));
      show(limit((event.clientY - box.top) / box.height * rows.length, rows.length),
        limit((event.clientX - box.left) / box.width * versions, versions), event.clientX, event.clientY);
    };
    const choose = () => select(rows[cell.row]);
    if (rows.length && versions) {
      picture.addEventListener("pointermove", over);
      picture.addEventListener("pointerleave", hide);
      picture.addEventListener("blur", hide);
      picture.addEventListener("click", (event) => { over(event); choose(); });
      picture.addEventListener("keydown", (event) => {
        const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
        if (event.key === "Enter") choose();
        else if (event.key === "Escape") hide();
        else if (moves[event.key]) {
          const row = Math.max(0, Math.min(rows.length - 1, cell.row + moves[event.key][0]));
          const place = Math.max(0, Math.min(versions - 1, cell.place + moves[event.key][1]));
          const box = picture.getBoundingClientRect();
          status.textContent = show(row, place, box.left + (place + 0.5) / versions * box.width, box.top + (row + 0.5) * height);
        } else return;
        event.preventDefault();
      });
    }
    const xs = at.get(run);
    const ends = versions > 2 ? [xs[0], xs[Math.floor((versions - 1) / 2)], xs[versions - 1]] : xs;
    return element("figure", { class: "panel" }, runs.length > 1 ? element("figcaption", { title: run.name }, key(run), short(run.name, 34)) : null,
      element("div", { class: "scroll" }, labels, element("div", { class: "cells" }, picture, cursor)),
      element("div", { class: "ends steps" }, ...ends.map((value) => element("span", {}, number(value)))));
  }

  // --- Selected tensors -------------------------------------------------------------------------------------------

  function select(path, only = false) {
    if (only) selected.clear();
    if (!selected.delete(path)) {
      selected.add(path);
      if (selected.size > SELECTED_MOST) selected.delete(selected.values().next().value);
    }
    const focused = document.activeElement, focusedRun = runs.find(({ picture }) => picture === focused);
    const title = focused.closest("#tensors tbody") && focused.title;
    if (heat) heat();
    drawSelected();
    drawTable();
    if (focusedRun) focusedRun.picture.focus();
    if (title) [...document.querySelectorAll("#tensors tbody .link")].find((one) => one.title === title)?.focus();
  }

  let drawSelected = () => {};
  function selection() {
    if (!measure) return null;
    const place = element("div");
    drawSelected = () => {
      forget(place);
      const paths = [...selected];
      const chips = element("div", { class: "chips" }, ...paths.map((path, index) => {
        const mark = element("i");
        mark.style.background = `var(--hue-${index % DASHES.length})`;
        return element("button", { title: path, "aria-label": `Remove ${path}`, onclick: () => select(path) }, mark, short(path), " ×");
      }));
      const series = paths.flatMap((path, index) => runs.filter((run) => run.rows.has(path)).map((run) => ({
        label: runs.length > 1 ? `${short(run.name, 12)} ${short(path, 20)}` : path, hue: paths.length > 1 ? index : run.place,
        dash: runs.length > 1 ? run.place : index, xs: at.get(run), ys: history(run, measure.key, run.rows.get(path)) })));
      const codes = paths.flatMap((path) => runs.filter((run) => run.rows.has(path)).map((run) => element("code", { class: "python", tabindex: 0 }, python(run, path, [measure.key]))));
      place.replaceChildren(...(paths.length ? [chips, element("div", { class: "pair" }, lines(measure.label, series, { log: measure.scale === "log", height: 270 }), ridges(paths)), ...codes]
        : [element("p", { class: "empty" }, "Choose a tensor in a heat map or in the table.")]));
      redraw(place);
    };
    drawSelected();
    return section("selected", "Selected tensors", null, place);
  }

  // Distributions of tensors over versions: lines that overlap, the oldest on top; the slider's version stands out.
  function ridges(paths) {
    const shown = paths.flatMap((path) => runs.filter((run) => run.ridges.has(run.rows.get(path))).map((run) => ({ run, path })));
    if (!shown.length) {
      return element("p", { class: "empty" }, "Distributions are kept of the largest weights; none of them is selected.");
    }
    const places = [...new Set(shown.flatMap(({ run }) => at.get(run)))].sort((a, b) => a - b);
    const output = element("output");
    const slider = element("input", { type: "range", min: 0, max: places.length - 1, value: places.length - 1, "aria-label": `Distribution at ${axis()}`, oninput: () => update() });
    const distribution = ({ run, path }) => run.ridges.get(run.rows.get(path));
    const frames = new Map(paths.map((path) => [path, frame(shown.filter((one) => one.path === path).map(distribution))]));
    const pictures = shown.map(({ run, path }) => {
      const { low, high } = frames.get(path);
      const canvas = element("canvas", { role: "img", "aria-label": `Distribution of ${path} over the versions of ${run.name}, from ${number(low)} to ${number(high)}` });
      return { run, path, canvas, found: distribution({ run, path }), box: element("figure", { class: "panel" },
        element("figcaption", { title: path }, short(runs.length > 1 ? `${run.name}: ${path}` : path, 46)), canvas) };
    });
    const update = () => {
      const value = places[slider.value];
      output.textContent = `${axis()} ${number(value)}`;
      slider.setAttribute("aria-valuetext", output.textContent);
      for (const { run, path, canvas, found } of pictures) drawRidges(canvas, run, found, value, frames.get(path));
    };
    const box = element("div", { class: "ridges" }, element("h3", {}, "Distribution over versions"),
      places.length > 1 ? element("label", { class: "slider" }, slider, output) : null,
      element("div", { class: "pictures" }, ...pictures.map(({ box }) => box)));
    redraws.push({ box, draw: update });
    return box;
  }

  // The axes of a tensor's distributions in all runs: the values that have counts, and the highest density.
  function frame(distributions) {
    const axes = distributions.map(({ edges, counts }) => {
      const used = edges.slice(1).map((_, bin) => counts.some((row) => row[bin] > 0));
      return { low: edges[Math.max(0, used.indexOf(true) - 1)], high: edges[Math.min(used.length, used.lastIndexOf(true) + 2)],
        most: Math.max(1, ...counts.map((row) => Math.max(...row))) / (edges[1] - edges[0]) };
    });
    const of = (pick, part) => pick(...axes.map((axis) => axis[part]));
    return { low: of(Math.min, "low"), high: of(Math.max, "high"), most: of(Math.max, "most") };
  }

  function drawRidges(canvas, run, { edges, counts }, value, { low, high, most }) {
    const width = canvas.clientWidth || 300, height = 240, bottom = 22, left = 46, ratio = devicePixelRatio || 1;
    canvas.width = width * ratio;
    canvas.height = height * ratio;
    const pen = canvas.getContext("2d");
    pen.scale(ratio, ratio);
    const xs = at.get(run);
    const now = Math.max(0, xs.findLastIndex((x) => x <= value));
    // A ridge for each of up to 40 versions, and always for the slider's.
    const stride = Math.ceil(counts.length / 40);
    const drawn = counts.map((_, place) => place).filter((place) => place % stride === 0 || place === now || place === counts.length - 1);
    const room = height - bottom - 8, rise = drawn.length > 1 ? room * 0.42 : room;
    const x = (number) => left + (number - low) / (high - low) * (width - left - 6);
    const step = edges[1] - edges[0];
    const base = (index) => height - bottom - (drawn.length > 1 ? (drawn.length - 1 - index) / (drawn.length - 1) * (room - rise) : 0);
    const outline = (place, index) => {
      pen.beginPath();
      pen.moveTo(x(low), base(index));
      counts[place].forEach((count, bin) => {
        const middle = edges[bin] + step / 2;
        if (middle > low && middle < high) pen.lineTo(x(middle), base(index) - count / step / most * rise);
      });
      pen.lineTo(x(high), base(index));
    };
    drawn.forEach((place, index) => {
      outline(place, index);
      pen.fillStyle = colour("--page");
      pen.globalAlpha = 0.75;
      pen.fill();
      pen.globalAlpha = 1;
      pen.strokeStyle = colour("--ridge");
      pen.lineWidth = 1;
      pen.stroke();
    });
    outline(now, drawn.indexOf(now));
    pen.fillStyle = `${hue(1)}55`;
    pen.fill();
    pen.strokeStyle = hue(1);
    pen.lineWidth = 2;
    pen.stroke();
    pen.fillStyle = colour("--muted");
    pen.font = "11px system-ui, sans-serif";
    pen.textAlign = "right";
    for (const index of new Set([0, drawn.length - 1])) pen.fillText(number(xs[drawn[index]]), left - 6, base(index));
    const tick = (align, value) => {
      pen.textAlign = align;
      pen.fillText(number(Number(value.toPrecision(3))), x(value), height - 6);
    };
    tick("left", low);
    tick("right", high);
    if (Math.min(-low, high) > 0.2 * (high - low)) tick("center", 0);
  }

  // --- Optimiser and storage --------------------------------------------------------------------------------------

  // The lower or upper tenth of the tensors, at each version.
  function over(run, key, share) {
    const rows = run.tensors.map((_, row) => history(run, key, row)).filter((values) => values.some(Number.isFinite));
    return run.versions.map((_, place) => {
      const values = rows.map((row) => row[place]).filter(Number.isFinite);
      return values.length ? quantile(sort(values), share) : null;
    });
  }

  function optimiser() {
    const has = (key) => data.measures.some((one) => one.key === key);
    const label = (run, text) => runs.length > 1 ? `${short(run.name, 16)}, ${text}` : text;
    const band = (low, high) => runs.flatMap((run, place) => [
      { label: label(run, high[2]), hue: run.place, xs: at.get(run), ys: over(run, high[0], high[1]), fillTo: place * 2 + 1 },
      { label: label(run, low[2]), hue: run.place, xs: at.get(run), ys: over(run, low[0], low[1]) }]);
    const plots = [
      has("v_low") && has("v_high") ? lines("Range of second moments v", band(["v_low", 0.1, "low"], ["v_high", 0.9, "high"]), { log: true }) : null,
      has("m_over_sqrt_v") ? lines("|m| / √v", band(["m_over_sqrt_v", 0.1, "10 %"], ["m_over_sqrt_v", 0.9, "90 %"]), { log: true }) : null,
    ].filter(Boolean);
    return plots.length ? section("optimiser", "Optimiser",
      "From the lower to the upper tenth of the tensors. Of v, each tensor counts with its first and last percentile.", element("div", { class: "pair" }, ...plots)) : null;
  }

  function storage() {
    if (!runs.some((run) => run.versions.length)) return null;
    const series = (field, label, place = 0) => runs.map((run) => ({ label: runs.length > 1 ? `${short(run.name, 20)}${label && `, ${label}`}` : label || field,
      hue: runs.length > 1 ? run.place : place, xs: at.get(run), ys: run.versions.map((version) => version[field]) }));
    const facts = runs.map(({ name, sizes, versions }) => {
      const kinds = ["base", "delta", "hot"].map((kind) => [versions.filter((version) => version.kind === kind).length, kind]).filter(([count]) => count);
      return `${runs.length > 1 ? `${name}: ` : ""}${bytes(sizes.files)} of files take ${bytes(sizes.stored)}; versions: ${kinds.map(([count, kind]) => `${count} ${kind}`).join(", ")}.`;
    });
    facts.push(data.freeable ? `A gc of the store would free ${bytes(data.freeable)}.` : "A gc of the store would free nothing.");
    return section("storage", "Storage", null, element("ul", { class: "facts" }, ...facts.map((text) => element("li", {}, text))), element("div", { class: "pair" },
      lines("Stored bytes of each version", [...series("stored", runs.length > 1 ? "" : "stored"), ...(runs.length > 1 ? [] : series("bytes", "file", 1))], { zero: true, format: bytes }),
      lines("Restore cost of each version", series("cost", runs.length > 1 ? "" : "cost, relative to the file in full"), { zero: true })));
  }

  // --- Lineage ----------------------------------------------------------------------------------------------------

  // The runs of the report and those they forked from or to: a lane each, in the order of their first versions.
  function lineage() {
    const byNumber = new Map(data.lineage.map((one) => [one.version, one]));
    const shown = new Set(runs.map(({ name }) => name));
    for (let grown = true; grown;) {
      grown = false;
      for (const { run, parent } of data.lineage) {
        const from = byNumber.get(parent);
        if (from && from.run !== run && shown.has(run) !== shown.has(from.run)) {
          shown.add(run).add(from.run);
          grown = true;
        }
      }
    }
    const versions = data.lineage.filter(({ run }) => shown.has(run)).sort((a, b) => a.version - b.version);
    if (versions.length < 2) return null;
    const lanes = [...new Set(versions.map(({ run }) => run))];
    const order = new Map(versions.map(({ version }, place) => [version, place]));
    const place = element("div");
    const draw = () => {
      const width = Math.max(place.clientWidth, 240), left = Math.min(150, width * 0.35), lane = 26;
      const x = (version) => left + 8 + order.get(version) / Math.max(1, versions.length - 1) * (width - left - 16);
      const y = (run) => lanes.indexOf(run) * lane + 16;
      const radius = (width - left) / versions.length > 12 ? 4 : (width - left) / versions.length > 6 ? 2.5 : 1.5;
      const picture = drawing("svg", { width, height: lanes.length * lane + 8, role: "img", "aria-label": `${plural(versions.length, "version")} in ${plural(lanes.length, "run")}` });
      for (const { version, run, parent } of versions) {
        const from = byNumber.get(parent);
        if (!from || !order.has(parent)) continue;
        const [x1, y1, x2, y2] = [x(parent), y(from.run), x(version), y(run)], bend = (x1 + x2) / 2;
        picture.append(drawing("path", { d: `M${x1} ${y1}C${bend} ${y1} ${bend} ${y2} ${x2} ${y2}`, class: "edge" }));
      }
      for (const { version, run, parent } of versions) {
        const node = drawing("circle", { cx: x(version), cy: y(run), r: radius, class: byNumber.has(parent) ? "node" : "node root" });
        node.append(drawing("title", {}, `${run}, version ${version}`));
        picture.append(node);
      }
      for (const run of lanes) picture.append(drawing("text", { x: 0, y: y(run) + 4, class: "lane" }, short(run, Math.floor(left / 7.5))));
      place.replaceChildren(picture);
    };
    redraws.push({ box: place, draw });
    return section("lineage", "Lineage", null, place);
  }

  // --- Table ------------------------------------------------------------------------------------------------------

  let drawTable = () => {};
  function table() {
    const measured = ["rms", "change", "distance", "unchanged", "rank", "bits"].flatMap((key) => data.measures.filter((one) => one.key === key));
    const last = (run, key, row) => {
      const values = history(run, key, row);
      return values[values.findLastIndex((value) => !Number.isNaN(value))] ?? NaN;
    };
    const records = runs.flatMap((run) => run.tensors.map((tensor, row) => ({ run, tensor, row,
      cells: [run.name, tensor.path, tensor.role, tensor.elements, ...measured.map(({ key }) => last(run, key, row))] })));
    const columns = ["run", "tensor", "role", "elements", ...measured.map(({ label }) => label)];
    const skipped = runs.length > 1 ? 0 : 1;
    let sorted = null, descending = false, filter = "", all = false;
    const head = element("tr"), body = element("tbody"), more = element("button", { class: "link", onclick: () => { all = true; drawTable(); } });
    const input = element("input", { type: "search", placeholder: "Filter: words of a path, role or dtype", "aria-label": "Filter the tensors", oninput: () => { filter = input.value; drawTable(); } });

    const header = (title, place) => element("th", { scope: "col", ...(place === 1 ? { class: "frozen" } : {}), "aria-sort": sorted !== place ? "none" : descending ? "descending" : "ascending" },
      element("button", { class: "link", onclick: () => { descending = sorted === place ? !descending : place >= 3; sorted = place; drawTable(); } },
        `${title}${sorted !== place ? "" : descending ? " ↓" : " ↑"}`));
    const line = ({ run, tensor, cells }) => {
      const code = python(run, tensor.path, measured.map(({ key }) => key));
      return element("tr", { "aria-selected": String(selected.has(tensor.path)) },
        skipped ? null : element("td", { title: run.name }, short(run.name, 20)),
        element("th", { scope: "row" }, element("button", { class: "link", title: tensor.path, "aria-pressed": String(selected.has(tensor.path)), onclick: () => select(tensor.path) }, short(tensor.path, 42))),
        element("td", {}, tensor.role), element("td", { title: tensor.sampled === null ? "all elements are read" : `${number(tensor.sampled * 100)} % of the elements are read` },
          `${tensor.dtype} ${tensor.shape.join(" × ")}${tensor.sampled === null ? "" : " ~"}`),
        ...cells.slice(4).map((value) => element("td", { class: "number" }, number(value))),
        element("td", {}, element("code", { class: "python", tabindex: 0, title: code }, code)));
    };
    drawTable = () => {
      const words = filter.toLowerCase().split(/\s+/).filter(Boolean);
      const found = records.filter(({ tensor, run }) => {
        const text = `${run.name} ${tensor.path} ${tensor.role} ${tensor.dtype}`.toLowerCase();
        return words.every((word) => text.includes(word));
      });
      if (sorted !== null) {
        const sign = descending ? -1 : 1;
        const compare = (a, b) => typeof a === "string" ? a.localeCompare(b) : Number.isNaN(a) - Number.isNaN(b) || sign * (a - b);
        found.sort((a, b) => (typeof a.cells[sorted] === "string" ? sign : 1) * compare(a.cells[sorted], b.cells[sorted]));
      }
      const rows = all ? found : found.slice(0, TABLE_ROWS);
      head.replaceChildren(...columns.map(header).slice(skipped), element("th", { scope: "col" }, "in Python"));
      body.replaceChildren(...rows.map(line));
      more.textContent = rows.length < found.length ? `Show all ${found.length.toLocaleString("en")}` : "";
    };
    drawTable();
    const about = "Numbers are of the latest version that has them; “~” marks tensors of which a sample is read. The Python line returns all of them.";
    return section("tensors", "Tensors", about, records.length ? element("div", {}, input,
      element("div", { class: "table", tabindex: 0, role: "region", "aria-label": "Table of tensors" }, element("table", {}, element("thead", {}, head), body)), more)
      : element("p", { class: "empty" }, "There are no tensors."));
  }

  // --- Definitions ------------------------------------------------------------------------------------------------

  function definitions() {
    if (!data.measures.length) return null;
    const rows = data.measures.map(({ key, label, about }) => element("tr", {},
      element("th", { scope: "row" }, label), element("td", { class: "text" }, about), element("td", {}, element("code", {}, key))));
    const head = element("tr", {}, ...["measure", "definition", "key"].map((title) => element("th", { scope: "col" }, title)));
    return section("measures", "Measures", "Definitions. The key names a measure for ckstore plot --measure, and for Run.statistics in Python.",
      element("div", { class: "table", tabindex: 0, role: "region", "aria-label": "Definitions of measures" },
        element("table", {}, element("thead", {}, head), element("tbody", {}, ...rows))));
  }

  // --- The page ---------------------------------------------------------------------------------------------------

  // Pictures are drawn once they are in the document, where they have a width.
  function redraw(within = document) {
    for (const { box, draw } of redraws) if (box.isConnected && within.contains(box)) draw();
  }

  function forget(within) {
    redraws = redraws.filter(({ box }) => !within.contains(box));
  }

  async function main() {
    const place = document.getElementById("report");
    await read();
    document.title = `${data.title} · ckstore report`;
    tooltip = element("div", { class: "tooltip", hidden: true, "aria-hidden": "true" });
    const sections = [findings, metrics, layers, selection, optimiser, storage, lineage, table, definitions].map((make) => make()).filter(Boolean);
    const links = element("nav", { "aria-label": "Sections" }, ...sections.map((one) => element("a", { href: `#${one.id}` }, one.querySelector("h2").textContent)));
    const note = "This file needs no other and requests nothing. Numbers have five significant digits; ckstore report --format json has all.";
    place.replaceChildren(header(), links, ...sections, element("footer", {}, note), tooltip);
    redraw();
    let width = innerWidth;
    addEventListener("resize", () => {
      if (innerWidth === width) return;
      width = innerWidth;
      requestAnimationFrame(() => redraw());
    });
    dark.addEventListener("change", () => redraw());
    // After the frame that shows it.
    requestAnimationFrame(() => setTimeout(() => { document.documentElement.dataset.drawn = performance.now().toFixed(0); }));
  }

  main().catch((error) => {
    document.getElementById("report").textContent = `This report cannot be drawn: ${error.message}. It needs a browser of 2023 or later.`;
    throw error;
  });
})();

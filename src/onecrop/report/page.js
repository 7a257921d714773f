"use strict";
// Draws the figures that the page carries, shows pictures on hover and neighbours on a click. Needs Plotly, nothing else.
const page = JSON.parse(document.getElementById("data").textContent);
const dark = matchMedia("(prefers-color-scheme: dark)");
const touch = matchMedia("(pointer: coarse)").matches;
const tip = document.getElementById("tip");
const near = document.getElementById("near");
let pending = 0;  // rings that are about to be drawn

function make(tag, className, text) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  return node;
}

// Cut picture n out of its sheet, in its true proportions, into the element; the longer side has `side` pixels.
function cut(node, set, n, side) {
  const facts = page.sets[set], aspect = facts.aspect ? facts.aspect[n] : 1;
  const width = side * Math.min(1, aspect), height = side / Math.max(1, aspect);
  const x = n % facts.columns, y = Math.floor(n / facts.columns);
  node.classList.add("sheet" + set);
  Object.assign(node.style, {
    width: width + "px", height: height + "px",
    backgroundSize: facts.columns * width + "px " + facts.rows * height + "px",
    backgroundPosition: -x * width + "px " + -y * height + "px",
  });
}

function label(set, n) {
  const facts = page.sets[set];
  return facts.labels ? facts.classes[facts.labels[n]] || "" : "";
}

function file(set, n) {
  return (page.sets[set].files || [])[n] || "";
}

function describe(set, n) {
  return [label(set, n), file(set, n) || "picture " + n].filter(Boolean).join(" · ");
}

function thumbnail(set, n, side) {
  const button = make("button", "thumb"), picture = make("i");
  button.type = "button";
  button.title = describe(set, n);
  button.setAttribute("aria-label", "neighbours of " + button.title);
  cut(picture, set, n, side);
  button.append(picture);
  button.addEventListener("click", () => showNeighbours(set, n));
  return button;
}

function neighbourRow(map, n, count) {
  const row = make("div", "row");
  for (let i = 0; i < Math.min(count, map.k); i++) {
    const other = map.neighbours[n * map.k + i], tile = make("div", "tile");
    const button = thumbnail(map.set, other, tileSide());
    if (page.sets[map.set].labels && label(map.set, other) !== label(map.set, n)) button.classList.add("other");
    tile.append(button, make("span", "cosine", (map.cosines[n * map.k + i] / 1000).toFixed(3)));
    row.append(tile);
  }
  return row;
}

function tileSide() {
  return innerWidth <= 600 ? 46 : 64;
}

function named(map) {
  const title = make("h3"), swatch = make("span", "swatch");
  swatch.style.background = map.colour;
  title.append(swatch, map.name);
  return title;
}

function fillQuery(block, set, n, count) {
  const query = make("div", "tile"), rows = make("div"), button = thumbnail(set, n, tileSide());
  button.classList.add("query");
  query.append(button, make("span", "", label(set, n) || file(set, n) || "picture " + n));
  for (const map of page.maps.filter((map) => map.set === set)) {
    if (page.maps.length > 1) rows.append(named(map));
    rows.append(neighbourRow(map, n, count));
  }
  block.append(query, rows);
}

function showNeighbours(set, n) {
  const shut = make("button", "shut", "close"), block = make("div", "query-block");
  shut.type = "button";
  shut.addEventListener("click", () => { clearTimeout(pending); near.hidden = true; highlight(set, () => []); });
  near.replaceChildren(shut, make("h3", "", "Nearest to " + describe(set, n)), block);
  fillQuery(block, set, n, 12);
  near.hidden = false;
  near.dataset.of = n;
  // after the pictures are on the screen: a map of 5,000 dots takes a moment to redraw
  clearTimeout(pending);
  pending = setTimeout(() => highlight(set, (map) => [n, ...map.neighbours.slice(n * map.k, (n + 1) * map.k)]), 20);
}

// Ring the pictures that `chosen` names, the first with a thicker ring, in every map of the set.
function highlight(set, chosen) {
  page.maps.forEach((map, place) => {
    const graph = document.getElementById("map" + place);
    if (map.set !== set || !graph.data) return;
    const rows = chosen(map), [x, y] = [0, 1].map((axis) => rows.map((row) => map.places[2 * row + axis]));
    const change = { x: [x], y: [y], "marker.line.width": [rows.map((_, i) => (i ? 1.5 : 3.5))] };
    Plotly.restyle(graph, change, [graph.data.length - 1]);
  });
}

function showTip(event, set, n) {
  const picture = make("i");
  picture.style.display = "block";
  cut(picture, set, n, 112);
  tip.replaceChildren(picture, make("span", "", describe(set, n)));
  tip.hidden = false;
  const box = tip.getBoundingClientRect(), gap = 14;
  const left = event.clientX + gap + box.width > innerWidth ? event.clientX - gap - box.width : event.clientX + gap;
  const top = event.clientY + gap + box.height > innerHeight ? event.clientY - gap - box.height : event.clientY + gap;
  Object.assign(tip.style, { left: Math.max(4, left) + "px", top: Math.max(4, top) + "px" });
}

function colours() {
  const style = getComputedStyle(document.documentElement), get = (name) => style.getPropertyValue(name).trim();
  return { ink: get("--ink"), faint: get("--faint"), line: get("--line"), card: get("--card") };
}

function themed(layout) {
  const { ink, faint, line, card } = colours(), axis = { gridcolor: line, zerolinecolor: line, linecolor: line };
  return {
    ...layout,
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { ...layout.font, color: ink, family: "system-ui, sans-serif", size: 12 },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: faint, activecolor: ink },
    hoverlabel: { bgcolor: card, bordercolor: line, font: { color: ink } },
    xaxis: { ...layout.xaxis, ...axis }, yaxis: { ...layout.yaxis, ...axis },
  };
}

function draw(graph) {
  const figure = JSON.parse(document.getElementById(graph.id + "-figure").textContent), isMap = graph.id.startsWith("map");
  const layout = themed(figure.layout);
  if (isMap) {
    layout.dragmode = touch ? false : "pan";  // a finger scrolls the page
    figure.data.at(-1).marker.line.color = colours().ink;
  }
  const options = { responsive: true, displaylogo: false, displayModeBar: isMap && !touch, scrollZoom: isMap && !touch };
  options.modeBarButtons = [["zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d"]];
  return Plotly.newPlot(graph, figure.data, layout, options).then(() => {
    if (!isMap) return;
    const map = page.maps[Number(graph.id.slice(3))];
    graph.on("plotly_hover", (hit) => showTip(hit.event, map.set, hit.points[0].customdata));
    graph.on("plotly_unhover", () => { tip.hidden = true; });
    graph.on("plotly_click", (hit) => { tip.hidden = true; showNeighbours(map.set, hit.points[0].customdata); });
    graph.dataset.drawn = "yes";
  });
}

// Figures are drawn when they come near the screen: eight maps of 5,000 pictures at once would take long.
const watcher = new IntersectionObserver((entries) => {
  for (const entry of entries.filter((entry) => entry.isIntersecting)) {
    watcher.unobserve(entry.target);
    draw(entry.target);
  }
}, { rootMargin: "300px" });
document.querySelectorAll(".graph").forEach((graph) => watcher.observe(graph));

dark.addEventListener("change", () => document.querySelectorAll(".graph").forEach((graph) => {
  if (!graph.data) return;
  if (graph.id.startsWith("map")) Plotly.restyle(graph, { "marker.line.color": colours().ink }, [graph.data.length - 1]);
  Plotly.relayout(graph, themed(graph.layout));
}));

for (const block of document.querySelectorAll("[data-query]")) {
  fillQuery(block, Number(block.dataset.set), Number(block.dataset.query), 6);
}
for (const place of document.querySelectorAll("[data-picture]")) {
  place.replaceWith(thumbnail(Number(place.dataset.set), Number(place.dataset.picture), tileSide()));
}

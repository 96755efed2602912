// Builds the page from the report, with charts by uPlot. Text is inserted as text, never as markup.
(() => {
"use strict";
const report = JSON.parse(document.getElementById("report").textContent);
const dark = matchMedia("screen and (prefers-color-scheme: dark)");
const COLORS = {
  light: ["#0b5cad", "#a8480a", "#0b6b47", "#7b3aa0", "#555b63", "#8a1c4a"],
  dark: ["#6db3ff", "#ff9f5a", "#4fd6a0", "#cf9af0", "#aab2bd", "#ff8fb8"],
};
const STEPS = {
  bytes: [[1, "B"], [1024, "KiB"], [2 ** 20, "MiB"], [2 ** 30, "GiB"], [2 ** 40, "TiB"]],
  seconds: [[1e-6, "us"], [1e-3, "ms"], [1, "s"], [60, "min"], [3600, "h"]],
  count: [[1, ""], [1e3, "k"], [1e6, "M"], [1e9, "G"]],
};
// Distances of ticks that are round numbers of their unit.
const scaled = (factors, by) => factors.flatMap((factor) => by.map((times) => times * factor));
const decades = scaled([1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1, 10, 100, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8, 1e9], [1, 2, 5]);
const TICKS = {
  bytes: Array.from({ length: 50 }, (_, power) => 2 ** power),
  seconds: [...decades.filter((step) => step < 30), 30, ...scaled([60, 600], [1, 2, 5]), ...scaled([3600, 36000, 360000], [1, 2, 5])],
  count: decades,
};
const text = (unit, value) => {
  if (value == null) return "-";
  if (value === 0) return "0";
  const steps = STEPS[unit];
  const [factor, name] = [...steps].reverse().find(([factor]) => Math.abs(value) >= factor) || steps[0];
  return `${Number((value / factor).toPrecision(4))}${name}`;
};
const add = (parent, tag, content, name) => {
  const node = parent.appendChild(document.createElement(tag));
  if (content != null) node.textContent = content;
  if (name) node.className = name;
  return node;
};

const header = document.querySelector("header");
add(header, "h1", report.title);
add(header, "p", report.source, "file");
for (const { name, lines, is_alarm } of report.diagnoses) {
  const box = add(header, "div", null, `diagnosis ${is_alarm ? "alarm" : "calm"}`);
  add(box, "strong", name);
  lines.forEach((line) => add(add(box, "p"), line.startsWith("export ") ? "code" : "span", line));
}
const main = document.querySelector("main");
const facts = add(main, "dl");
for (const [name, value] of report.facts) {
  const fact = add(facts, "div");
  add(fact, "dt", name);
  add(fact, "dd", value);
}
const figures = add(main, "div", null, "figures");
for (const { id, title, description } of report.charts) {
  const section = add(figures, "section");
  add(section, "h2", title);
  const figure = add(section, "figure");
  figure.id = id;
  add(figure, "figcaption", description);
}
if (report.table) {
  const section = add(main, "section");
  add(section, "h2", report.table.name);
  const table = add(section, "table");
  const first = add(table, "tr");
  report.table.head.forEach((cell) => (add(first, "th", cell).scope = "col"));
  report.table.rows.forEach((cells) => {
    const row = add(table, "tr");
    cells.forEach((cell) => add(row, "td", cell));
  });
}
if (report.notes.length > 0) {
  const section = add(main, "section");
  add(section, "h2", "Notes");
  const list = add(section, "ul");
  report.notes.forEach((note) => add(list, "li", note));
}

const isMark = ({ shape }) => shape === "discs" || shape === "rings";
const holds = ({ shape }) => shape === "steps" || shape === "area";

// The columns of a panel with a common x; areas are stacked, each with its own values.
function columns(series, x) {
  const shift = x.clock || 0;
  const tables = series.map(({ points }) => [points.map((point) => point[0] + shift), points.map((point) => point[1])]);
  const [xs, ...own] = uPlot.join(tables);
  series.forEach((one, at) => {
    let last = null;
    if (holds(one)) own[at] = own[at].map((value) => (last = value ?? last));
  });
  const sum = xs.map(() => 0);
  const drawn = own.map((column, at) => {
    if (series[at].shape !== "area") return column;
    return column.map((value, row) => (sum[row] += value || 0));
  });
  return { xs, own, drawn };
}

function draw(figure, panel, parent) {
  const { x } = figure;
  const mode = dark.matches ? "dark" : "light";
  const style = getComputedStyle(document.documentElement);
  const [ink, paper, alarm] = ["--ink", "--paper", "--alarm"].map((name) => style.getPropertyValue(name));
  const grid = { stroke: style.getPropertyValue("--line"), width: 1 };
  // The lowest area is drawn last, over those that it is part of.
  const order = panel.series.filter(({ points }) => points.length > 0);
  if (order.length === 0) return null;
  const { xs, own, drawn } = columns(order, x);
  const last = order.filter(({ shape }) => shape === "area").length - 1;
  const at = order.map((one, index) => (one.shape === "area" ? last - index : index));
  const series = at.map((index, row) => {
    const one = order[index];
    const color = isMark(one) ? alarm : COLORS[mode][panel.series.indexOf(one) % 6];
    return {
      label: one.name,
      stroke: color,
      width: isMark(one) ? 0 : 1.5,
      fill: one.shape === "area" ? color : undefined,
      dash: one.shape === "steps" && last >= 0 ? [6, 4] : undefined,
      spanGaps: true,
      paths: isMark(one) ? () => null : holds(one) ? uPlot.paths.stepped({ align: 1 }) : undefined,
      points: isMark(one)
        // Marks are drawn over areas, so each has a part in the background colour.
        ? { show: true, size: 8, width: 2, ...(one.shape === "discs" ? { stroke: paper, fill: color } : { stroke: color, fill: paper }) }
        : { show: false },
      value: (_, value, __, row) => text(panel.y.unit, row == null ? null : own[index][row]),
    };
  });
  const isClock = x.clock != null;
  const options = {
    width: parent.clientWidth,
    height: panel.is_lane ? 130 : 320,
    title: panel.y.name,
    tzDate: (time) => uPlot.tzDate(new Date(time * 1e3), "UTC"),
    cursor: { y: false, sync: { key: figure.id } },
    legend: { markers: { fill: (_, row) => series[row - 1].points.fill ?? series[row - 1].fill } },
    scales: {
      x: { time: isClock },
      y: { range: (_, __, most) => [0, most > 0 ? most * 1.05 : 1] },
    },
    axes: [
      { stroke: ink, grid, ticks: grid, ...(isClock ? { space: 90 } : { incrs: TICKS[x.unit], values: (_, all) => all.map((value) => (value == null ? "" : text(x.unit, value))) }) },
      { stroke: ink, grid, ticks: grid, size: 76, incrs: TICKS[panel.y.unit], values: (_, all) => all.map((value) => text(panel.y.unit, value)) },
    ],
    series: [{ label: isClock ? `${x.name} (UTC)` : x.name, ...(isClock ? {} : { value: (_, value) => text(x.unit, value) }) }, ...series],
  };
  return new uPlot(options, [xs, ...at.map((index) => drawn[index])], parent);
}

let charts = [];
function drawAll() {
  charts.forEach((chart) => chart && chart.destroy());
  charts = report.charts.flatMap((figure) => {
    const parent = document.getElementById(figure.id);
    return figure.panels.map((panel) => draw(figure, panel, parent));
  });
}
let width = 0;
addEventListener("resize", () => {
  if (document.body.clientWidth === width) return;
  width = document.body.clientWidth;
  drawAll();
});
dark.addEventListener("change", drawAll);
drawAll();
})();

"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const height = 210, minPoints = 40; // pixels; curves with more points also get a smoothed line
const unsmoothed = /^lr$|^num_|memory/;
const option = (name) => document.getElementById(name).checked;
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
let plots = [];

function format(value, unit) {
  if (value === null || value === undefined) return "–";
  if (unit !== "B") return String(Number(value.toPrecision(Math.abs(value) >= 1e5 ? 7 : 4)));
  const power = Math.max(0, Math.min(4, Math.floor(Math.log10(Math.abs(value) || 1) / 3)));
  return Number((value / 1000 ** power).toPrecision(3)) + [" B", " kB", " MB", " GB", " TB"][power];
}

// Axes have little space: 12000 is 12k.
function formatTick(value, unit) {
  if (value === null) return "";
  if (unit === "B") return format(value, unit);
  const size = Math.abs(value);
  if (size !== 0 && size < 1e-3) return value.toExponential();
  for (const [limit, suffix] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]])
    if (size >= limit) return Number((value / limit).toPrecision(4)) + suffix;
  return String(Number(value.toPrecision(4)));
}

// Running mean over 1/50 of a curve. Gaps stay gaps.
function smooth(values) {
  const half = Math.max(1, Math.floor(values.length / 100));
  return values.map((value, i) => {
    if (value === null) return null;
    const near = values.slice(Math.max(0, i - half), i + half + 1).filter((other) => other !== null);
    return near.reduce((sum, other) => sum + other, 0) / near.length;
  });
}

function seriesOf(chart) {
  const lines = [], tables = [];
  const evaluated = chart.curves.some((curve) => curve.eval) && chart.curves.some((curve) => !curve.eval);
  for (const curve of chart.curves) {
    const single = data.runs.length === 1;
    const stroke = "--run" + (single ? Number(evaluated && curve.eval) : curve.run % 8);
    const metric = (curve.eval ? "eval/" : "") + chart.metric.replace(/^eval\//, "");
    const name = single ? metric : data.runs[curve.run] + (evaluated && curve.eval ? " (eval)" : "");
    const smoothed = option("smooth") && curve.values.length > minPoints && !curve.eval && !unsmoothed.test(chart.metric);
    const few = curve.values.length <= minPoints;
    const base = { label: name, value: (_, value) => format(value, chart.unit), spanGaps: false };
    lines.push({ ...base, stroke: () => color(stroke), width: smoothed ? 1 : 1.75, alpha: smoothed ? 0.35 : 1,
      dash: !single && evaluated && curve.eval ? [6, 4] : undefined, points: { show: few, size: 5, fill: () => color(stroke) } });
    tables.push([curve.steps, curve.values]);
    if (smoothed) {
      lines.push({ ...base, class: "smoothed", stroke: () => color(stroke), width: 2, points: { show: false }, of: lines.length });
      tables.push([curve.steps, smooth(curve.values)]);
    }
  }
  return { lines, tables };
}

// A constant curve is in the middle of its axis.
function rangeOf(min, max) {
  if (min === null) return [0, 1];
  return min === max ? [min - (Math.abs(min) * 0.1 || 1), max + (Math.abs(max) * 0.1 || 1)] : uPlot.rangeNum(min, max, 0.1, true);
}

function plot(chart, box) {
  const { lines, tables } = seriesOf(chart);
  const positive = chart.curves.every((curve) => curve.values.every((value) => value === null || value > 0));
  const axis = { stroke: () => color("--faint"), grid: { stroke: () => color("--line"), width: 1 }, ticks: { show: false },
    font: "11px system-ui, sans-serif" };
  const options = {
    width: box.clientWidth, height,
    cursor: { y: false, drag: { x: true, y: false }, sync: { key: "step", scales: ["x", null] }, points: { size: 7 } },
    scales: { x: { time: false }, y: option("log") && positive ? { distr: 3 } : { range: (_, min, max) => rangeOf(min, max) } },
    axes: [{ ...axis, size: 26, space: 60, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6, 1e7],
      values: (_, splits) => splits.map((value) => formatTick(value, "")) },
    { ...axis, size: 58, values: (_, splits) => splits.map((value) => formatTick(value, chart.unit)) }],
    series: [{ label: "step", value: (_, value) => (value === null || value === undefined ? "–" : String(value)) }, ...lines],
    hooks: { setSeries: [(u, index, change) => {
      if (change.show === undefined) return;
      u.series.forEach((series, other) => { if (series.of === index) u.setSeries(other, { show: change.show }, false); });
    }] },
  };
  const u = new uPlot(options, uPlot.join(tables), box);
  for (const event of ["touchstart", "touchmove"])
    u.over.addEventListener(event, (touch) => {
      const area = u.over.getBoundingClientRect(), finger = touch.touches[0];
      u.setCursor({ left: finger.clientX - area.left, top: finger.clientY - area.top }, true, true);
    }, { passive: true });
  return u;
}

function draw() {
  plots.forEach((u) => u.destroy());
  plots = [...document.querySelectorAll(".plot")].map((box, index) => plot(data.charts[index], box));
}

const redraw = () => plots.forEach((u) => u.redraw(true, true));
document.querySelectorAll("[data-run]").forEach((dot) => { dot.style.background = `var(--run${dot.dataset.run % 8})`; });
if (data.charts.length) {
  draw();
  for (const name of ["smooth", "log"]) document.getElementById(name).addEventListener("change", draw);
  for (const query of ["print", "(prefers-color-scheme: dark)"]) matchMedia(query).addEventListener("change", redraw);
  new ResizeObserver(() => plots.forEach((u) => {
    const width = u.root.parentElement.clientWidth;
    if (width !== u.width) u.setSize({ width, height });
  })).observe(document.body);
}

// A page of `tune watch` loads itself again, unless someone zooms in.
const isZoomed = () => plots.some((u) => u.scales.x.min > u.data[0][0] || u.scales.x.max < u.data[0][u.data[0].length - 1]);
if (data.reload) setInterval(() => { if (!document.hidden && !isZoomed()) location.reload(); }, data.reload * 1000);

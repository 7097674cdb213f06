import { useEffect, useRef, useState } from "preact/hooks";
import uPlot from "uplot";
import { getJson, type MetricPage, type Point } from "./api";
import type { ViewProps } from "./main";
import { clock, count, duration, Notice, percent, Tile } from "./parts";

interface Series {
  name: string;
  value: (point: Point) => number | null;
}

const MS = 1000;
const CHARTS: { title: string; unit: string; series: Series[] }[] = [
  { title: "Tokens per second", unit: "", series: [{ name: "prompt", value: (p) => p.input_tokens_per_s }, { name: "output", value: (p) => p.output_tokens_per_s }] },
  { title: "Time to first token", unit: " ms", series: [{ name: "median", value: (p) => p.ttft_p50 === null ? null : p.ttft_p50 * MS }, { name: "95 %", value: (p) => p.ttft_p95 === null ? null : p.ttft_p95 * MS }] },
  { title: "Time between tokens", unit: " ms", series: [{ name: "median", value: (p) => p.itl_p50 === null ? null : p.itl_p50 * MS }, { name: "95 %", value: (p) => p.itl_p95 === null ? null : p.itl_p95 * MS }] },
  { title: "Requests per second", unit: "", series: [{ name: "ended", value: (p) => p.requests_per_s }, { name: "failed", value: (p) => p.errors_per_s }] },
  { title: "Requests", unit: "", series: [{ name: "in flight", value: (p) => p.num_inflight }, { name: "before their first token", value: (p) => p.num_queued }] },
  { title: "Prompt tokens found in caches", unit: " %", series: [{ name: "cached", value: (p) => p.cached_share === null ? null : p.cached_share * 100 }] },
];

export function Metrics(_: ViewProps) {
  const [model, setModel] = useState("");
  const [page, setPage] = useState<MetricPage | null>(null);
  const [problem, setProblem] = useState("");
  useEffect(() => {
    let isOver = false;
    const load = async () => {
      try {
        const found = await getJson<MetricPage>(`/console/api/metrics?model=${encodeURIComponent(model)}`);
        if (isOver) return;
        setPage(found);
        setProblem("");
      } catch (error) {
        if (!isOver) setProblem((error as Error).message);
      }
    };
    void load();
    const timer = setInterval(load, 5000);
    return () => {
      isOver = true;
      clearInterval(timer);
    };
  }, [model]);
  if (problem) return <Notice kind="bad">{problem}</Notice>;
  if (!page) return <p class="muted">Loading …</p>;
  const last = page.points[page.points.length - 1];
  return (
    <>
      <div class="tools">
        <label>Model{" "}
          <select value={model} onChange={(event) => setModel(event.currentTarget.value)}>
            <option value="">all together</option>
            {page.models.map((name) => <option value={name}>{name}</option>)}
          </select>
        </label>
        <span class="muted small">The last hour, one point every {page.interval_s} s, kept in this process; quantiles are interpolated in the buckets of <a href="/metrics">/metrics</a>.</span>
      </div>
      <div class="tiles">
        <Tile name="Output tokens/s" value={count(last?.output_tokens_per_s)} />
        <Tile name="First token, median" value={duration(last?.ttft_p50 == null ? null : last.ttft_p50 * MS)} />
        <Tile name="Between tokens, median" value={duration(last?.itl_p50 == null ? null : last.itl_p50 * MS)} />
        <Tile name="In flight" value={count(last?.num_inflight)} note={`${count(last?.num_queued)} before their first token`} />
        <Tile name="Cached" value={percent(last?.cached_share)} note="of prompt tokens" />
      </div>
      {page.points.length < 2 ? <Notice>The first points come in a few seconds.</Notice> : (
        <div class="charts">{CHARTS.map((chart) => <Chart {...chart} points={page.points} />)}</div>
      )}
    </>
  );
}

function Chart(props: { title: string; unit: string; series: Series[]; points: Point[] }) {
  const place = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | null>(null);
  const data = [props.points.map((point) => point.at), ...props.series.map((one) => props.points.map(one.value))] as uPlot.AlignedData;
  const latest = useRef(data);
  latest.current = data;
  useEffect(() => {
    const element = place.current!;
    const draw = () => {
      plot.current?.destroy();
      const style = getComputedStyle(document.documentElement);
      const colour = (name: string) => style.getPropertyValue(name).trim();
      const axis = { stroke: colour("--muted"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false }, font: "12px system-ui" };
      plot.current = new uPlot(
        {
          width: element.clientWidth || 300,
          height: 170,
          cursor: { y: false },
          legend: { show: true, live: true },
          scales: { y: { range: (_, __, most) => [0, most > 0 ? most * 1.1 : 1] } },
          axes: [{ ...axis, space: 80, values: (_, marks) => marks.map(clock) }, { ...axis, size: 56, values: (_, marks) => marks.map((mark) => count(mark)) }],
          series: [
            { value: (_, at) => (at == null ? "–" : clock(at)) },
            ...props.series.map((one, number) => ({
              label: one.name,
              stroke: colour(`--series-${number}`),
              width: 2,
              spanGaps: false,
              points: { size: 4 },
              value: (_: uPlot, value: number | null) => (value == null ? "–" : `${value.toFixed(1)}${props.unit}`),
            })),
          ],
        },
        latest.current,
        element,
      );
    };
    draw();
    const resized = new ResizeObserver(() => plot.current?.setSize({ width: element.clientWidth || 300, height: 170 }));
    resized.observe(element);
    const themed = new MutationObserver(draw);
    themed.observe(document.documentElement, { attributes: true, attributeFilter: ["data-theme"] });
    const media = matchMedia("(prefers-color-scheme: dark)");
    media.addEventListener("change", draw);
    return () => {
      resized.disconnect();
      themed.disconnect();
      media.removeEventListener("change", draw);
      plot.current?.destroy();
    };
  }, []);
  useEffect(() => plot.current?.setData(data), [props.points]);
  return (
    <section class="chart" aria-label={props.title}>
      <h2>{props.title}{props.unit && `,${props.unit}`}</h2>
      <div ref={place} />
    </section>
  );
}

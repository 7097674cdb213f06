import { useState } from "preact/hooks";
import type { LogLine } from "./api";
import type { ViewProps } from "./main";
import { clock, Notice, Offline, useLive } from "./parts";

const MAX_SHOWN = 500;
const LEVELS = ["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"];

export function Logs(_: ViewProps) {
  const [level, setLevel] = useState("INFO");
  const [text, setText] = useState("");
  const live = useLive<{ lines: LogLine[] }>(["log"], { lines: [] }, (old, _name, lines: LogLine[]) => {
    const last = old.lines[old.lines.length - 1];
    // after a broken connection lines come again; those of a process that was started meanwhile are numbered from 1
    const isNew = (line: LogLine) => !last || line.number > last.number || line.at > last.at;
    return { lines: [...old.lines, ...lines.filter(isNew)].slice(-MAX_SHOWN) };
  });
  const shown = live.value.lines.filter(
    (line) => LEVELS.indexOf(line.level) >= LEVELS.indexOf(level) && `${line.target} ${line.message} ${line.request_id ?? ""}`.includes(text),
  );
  return (
    <>
      <Offline live={live} />
      <div class="tools">
        <label>Level{" "}
          <select value={level} onChange={(event) => setLevel(event.currentTarget.value)}>{LEVELS.slice(0, 4).map((one) => <option>{one}</option>)}</select>
        </label>
        <label>Contains <input value={text} onInput={(event) => setText(event.currentTarget.value)} /></label>
        <span class="muted small">This process's last lines; workers log for themselves.</span>
      </div>
      {!shown.length && <Notice>No line matches.</Notice>}
      <ol class="log" tabIndex={0} aria-label="Lines of the log">
        {[...shown].reverse().map((line) => (
          <li key={`${line.at} ${line.number}`} class={line.level.toLowerCase()}>
            <span class="muted">{clock(line.at)}</span> <b>{line.level}</b> <span class="muted">{line.target}</span> {line.message}
            {line.request_id && <> <a href={`#/requests/${encodeURIComponent(line.request_id)}`} title={line.request_id}>request</a></>}
          </li>
        ))}
      </ol>
    </>
  );
}

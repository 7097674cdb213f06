import "uplot/dist/uPlot.min.css";
import "./style.css";
import { render } from "preact";
import type { ComponentType } from "preact";
import { useEffect, useState } from "preact/hooks";
import { apiKey, getJson, type Session, setApiKey, whenSignedOut } from "./api";
import { Cache } from "./cache";
import { Chat, forgetChat } from "./chat";
import { Logs } from "./logs";
import { Metrics } from "./metrics";
import { Models } from "./models";
import { Planner } from "./planner";
import { Requests } from "./requests";
import { Topology } from "./topology";
import { Usage } from "./usage";

export interface ViewProps {
  session: Session;
  rest: string; // of the address, after the view's name
}

interface View {
  name: string;
  title: string;
  question: string;
  component: ComponentType<ViewProps>;
  forAdmins?: boolean;
}

const VIEWS: View[] = [
  { name: "chat", title: "Chat", question: "What does the model say?", component: Chat },
  { name: "topology", title: "Topology", question: "Who serves what, now?", component: Topology },
  { name: "requests", title: "Requests", question: "Where did each request go, and why?", component: Requests },
  { name: "cache", title: "KV map", question: "Which worker has which prefix?", component: Cache, forAdmins: true },
  { name: "metrics", title: "Metrics", question: "How fast is it, and how full?", component: Metrics },
  { name: "planner", title: "Planner", question: "How many workers, and why?", component: Planner, forAdmins: true },
  { name: "models", title: "Models", question: "What is served, and with which limits?", component: Models },
  { name: "usage", title: "Usage", question: "Who used how much?", component: Usage },
  { name: "logs", title: "Logs", question: "What did the frontend report?", component: Logs, forAdmins: true },
];

function place(): { name: string; rest: string } {
  const [name = "", ...rest] = location.hash.replace(/^#\/?/, "").split("/");
  return { name: name || "chat", rest: rest.join("/") };
}

function App() {
  const [session, setSession] = useState<Session | null>(null);
  const [problem, setProblem] = useState("");
  const [needsKey, setNeedsKey] = useState(false);
  const [where, setWhere] = useState(place());
  const [theme, setTheme] = useState(localStorage.getItem("dynamo-theme") ?? "");

  async function open() {
    try {
      setSession(await getJson<Session>("/console/api/session"));
      setNeedsKey(false);
      setProblem("");
    } catch (error) {
      setProblem((error as Error).message);
    }
  }
  useEffect(() => {
    whenSignedOut(() => {
      setSession(null);
      setNeedsKey(true);
    });
    void open();
    const onHash = () => setWhere(place());
    addEventListener("hashchange", onHash);
    return () => removeEventListener("hashchange", onHash);
  }, []);
  useEffect(() => {
    if (theme) document.documentElement.dataset.theme = theme;
    else delete document.documentElement.dataset.theme;
    localStorage.setItem("dynamo-theme", theme);
  }, [theme]);
  useEffect(() => { // on a phone the views are one row that scrolls
    document.querySelector("nav [aria-current]")?.scrollIntoView({ block: "nearest", inline: "center" });
  }, [where.name, session]);
  const shown = VIEWS.filter((view) => !view.forAdmins || session?.may_administer);
  useEffect(() => {
    const onKey = (event: KeyboardEvent) => {
      // by the place of the key: on a Mac, Alt gives it another character
      const view = event.altKey && !event.ctrlKey ? shown[Number(event.code.replace("Digit", "")) - 1] : undefined;
      if (!view) return;
      event.preventDefault();
      location.hash = `#/${view.name}`;
    };
    addEventListener("keydown", onKey);
    return () => removeEventListener("keydown", onKey);
  }, [session]);

  if (needsKey) return <SignIn problem={apiKey() ? problem : ""} onKey={(key) => { setApiKey(key); void open(); }} />;
  if (!session) return <main key="connecting" class="alone"><p role="status">{problem || "Connecting …"}</p></main>;
  const view = shown.find((one) => one.name === where.name) ?? shown[0]!;
  const Shown = view.component;
  document.title = `${view.title} · Dynamo`;
  return (
    <>
      <a class="skip" href="#content" onClick={(event) => { event.preventDefault(); document.getElementById("content")?.focus(); }}>
        Skip to content
      </a>
      <header>
        <a class="brand" href="#/chat"><img src="/console/icon.svg" alt="" width="24" height="24" />Dynamo</a>
        <nav aria-label="Views">
          {shown.map((one, place) => (
            <a href={`#/${one.name}`} aria-current={one === view ? "page" : undefined} title={`${one.question} (Alt+${place + 1})`}>
              {one.title}
            </a>
          ))}
        </nav>
        <div class="corner">
          <label class="theme">
            <span class="hidden">Theme</span>
            <select value={theme} onChange={(event) => setTheme(event.currentTarget.value)}>
              <option value="">System</option>
              <option value="light">Light</option>
              <option value="dark">Dark</option>
            </select>
          </label>
          {session.key && (
            <button type="button" onClick={() => { forgetChat(); setApiKey(""); setSession(null); setNeedsKey(true); }}>
              Sign out {session.key}
            </button>
          )}
          <a class="muted small" href="/docs">API {session.version}</a>
          {session.process && <span class="muted small">process {session.process} of several</span>}
        </div>
      </header>
      <main key="content" id="content" tabIndex={-1} class={`view-${view.name}`}>
        <h1>{view.title} <small>{view.question}</small></h1>
        <Shown key={view.name} session={session} rest={where.rest} />
      </main>
    </>
  );
}

function SignIn(props: { problem: string; onKey: (key: string) => void }) {
  const [key, setKey] = useState("");
  return (
    <main key="sign-in" class="alone">
      <h1><img src="/console/icon.svg" alt="" width="32" height="32" /> Dynamo</h1>
      <form onSubmit={(event) => { event.preventDefault(); props.onKey(key.trim()); }}>
        <label>
          API key
          <input type="password" autocomplete="off" value={key} autofocus onInput={(event) => setKey(event.currentTarget.value)} />
        </label>
        <p class="muted">This server asks for a key. It is kept in this tab only.</p>
        {props.problem && <p class="notice bad" role="alert">{props.problem}</p>}
        <button class="primary" type="submit">Open the console</button>
      </form>
    </main>
  );
}

render(<App />, document.getElementById("app")!);

// Builds the console into the package: `npm ci && npm run build`. The result is checked in, so that nobody else needs node.
// build.json names the digest of every source and of every file made from them; a test compares both.
import { createHash } from "node:crypto";
import { copyFileSync, readFileSync, readdirSync, writeFileSync } from "node:fs";
import * as esbuild from "esbuild";

const target = "../src/dynamo/frontend/console/assets";
const options = {
  entryPoints: { app: "src/main.tsx" },
  outdir: target,
  bundle: true,
  minify: true,
  format: "esm",
  target: "es2022",
  jsx: "automatic",
  jsxImportSource: "preact",
  legalComments: "none",
};

function digest(path) {
  return createHash("sha256").update(readFileSync(path)).digest("hex");
}

function digests(folder, names) {
  return Object.fromEntries(names.sort().map((name) => [name, digest(`${folder}/${name}`)]));
}

async function build() {
  await esbuild.build(options);
  for (const name of ["index.html", "icon.svg"]) copyFileSync(name, `${target}/${name}`);
  const sources = [
    ...readdirSync("src").map((name) => `src/${name}`),
    ...["index.html", "icon.svg", "build.mjs", "package.json", "package-lock.json", "tsconfig.json"],
  ];
  const outputs = readdirSync(target).filter((name) => name !== "build.json");
  const made = { sources: digests(".", sources), outputs: digests(target, outputs) };
  writeFileSync(`${target}/build.json`, JSON.stringify(made, null, 1) + "\n");
}

if (process.argv.includes("--watch")) {
  const context = await esbuild.context(options);
  await context.watch();
} else {
  await build();
}

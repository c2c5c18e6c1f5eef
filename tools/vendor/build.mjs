// Bundles the libraries of the server's page, with their licences, so that a clone needs Python alone.
//
// A library that sets style attributes would meet the page's content security policy: it sets properties instead.

import { build } from "esbuild";
import { readdirSync, readFileSync, writeFileSync } from "node:fs";

const OUT = new URL("../../twostroke/server/page/static/vendor/", import.meta.url).pathname;
const LANGUAGES =
  "markup css clike javascript typescript jsx tsx python bash c cpp csharp java kotlin go rust swift ruby sql json yaml toml ini diff " +
  "markdown docker makefile lua r haskell powershell latex julia zig nasm";
const ENTRIES = {
  markdown: 'import MarkdownIt from "markdown-it"; import footnote from "markdown-it-footnote"; export { MarkdownIt, footnote };',
  math: 'import temml from "temml/dist/temml.mjs"; export const { render } = temml;',
  highlight: `import "manual"; import Prism from "prismjs"; ${LANGUAGES.split(" ").map((one) => `import "prismjs/components/prism-${one}.js";`).join(" ")} export default Prism;`,
};
const STYLE = /\.setAttribute\("style", "([\w-]+): ?([\w-]+);?"\)/g;
const camel = (name) => name.replace(/-(\w)/g, (_, letter) => letter.toUpperCase());
const properties = {
  name: "properties instead of style attributes",
  setup({ onLoad, onResolve }) {
    onLoad({ filter: /temml\.mjs$/ }, ({ path }) => ({
      contents: readFileSync(path, "utf8").replace(STYLE, (_, name, value) => `.style.${camel(name)} = "${value}"`),
    }));
    onResolve({ filter: /^manual$/ }, () => ({ path: "manual", namespace: "manual" }));
    onLoad({ filter: /.*/, namespace: "manual" }, () => ({ contents: "self.Prism = { manual: true };" })); // it starts nothing by itself
  },
};

const used = new Set();
for (const [name, contents] of Object.entries(ENTRIES)) {
  const { metafile } = await build({
    stdin: { contents, resolveDir: import.meta.dirname },
    outfile: `${OUT}${name}.js`,
    bundle: true, minify: true, format: "esm", target: "es2022", metafile: true, legalComments: "none", plugins: [properties],
  });
  for (const path of Object.keys(metafile.inputs)) used.add(/node_modules\/((?:@[^/]+\/)?[^/]+)/.exec(path)?.[1]);
}
used.delete(undefined);
const texts = [...used].sort().map((name) => {
  const root = `${import.meta.dirname}/node_modules/${name}/`;
  const { version, license } = JSON.parse(readFileSync(`${root}package.json`, "utf8"));
  const file = readdirSync(root).find((one) => /^licen[sc]e/i.test(one));
  return `${name} ${version} (${license})\n\n${readFileSync(root + file, "utf8").trim()}\n`;
});
writeFileSync(`${OUT}LICENSES.txt`, texts.join(`\n${"-".repeat(80)}\n\n`));

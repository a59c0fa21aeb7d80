// The panel beside the text: names, strips, numbers, gates and histograms of a layer.

function layerName(layer) {
  if (!layer.geometry) return `${layer.layer}, dense`;
  return layer.num_blocks ? `${layer.layer}` : `${layer.layer}, no choice`;
}

const STRIPS = { chosen: "chosen", scores: "score", mass: "dense twin" };
const stripsOf = (layer) => Object.keys(STRIPS).filter((name) => at(`layer${layer.layer}-${name}`));
let strips = [];
let meters = [];

function buildStrips(layer) {
  strips = [];
  at("blocks").replaceChildren();
  for (let group = 0; layer.num_blocks && group < layer.num_kv_heads; group++) {
    const strip = element("div", { className: "strip group" }, element("b", {}, `layer ${layer.layer}, KV head ${group}`));
    strip.dataset.group = group;
    for (const name of stripsOf(layer)) {
      const canvas = element("canvas", { width: layer.num_blocks, height: 1 });
      canvas.setAttribute("aria-hidden", "true");
      canvas.addEventListener("pointermove", (event) => describeCell(layer, group, blockAt(canvas, layer, event)));
      canvas.addEventListener("pointerleave", () => describeCell(layer, group, null));
      canvas.addEventListener("click", (event) => {
        choose(layer.layer, group);
        inText(layer, blockAt(canvas, layer, event))[0].scrollIntoView({ block: "nearest" });
      });
      strip.append(element("span", {}, STRIPS[name]), canvas);
      strips.push({ canvas, name, group });
    }
    at("blocks").append(strip);
  }
}

function blockAt(canvas, layer, event) {
  const { left, width } = canvas.getBoundingClientRect();
  return Math.max(0, Math.min(layer.num_blocks - 1, Math.floor(((event.clientX - left) / width) * layer.num_blocks)));
}

const percent = (share) => `${(100 * share).toFixed(1)} %`;
const tokensOf = (layer, block) => `${block * widthOf(layer)} to ${Math.min((block + 1) * widthOf(layer), numTokens) - 1}`;

function cells(layer, group, block) {
  const why = !isChosen(layer, state.token, group, block) ? "not chosen" : isForced(layer, state.token, block) ? "always" : "by score";
  const names = stripsOf(layer).filter((name) => name !== "chosen");
  const values = names.map((name) => shareOf(layer, name, state.token, group, block) * largestOf(layer, name, state.token, group));
  return [block, tokensOf(layer, block), why, ...values.map((value, index) => (names[index] === "mass" ? percent(value) : value.toFixed(4)))];
}

function describeCell(layer, group, block) {
  for (const peeked of document.querySelectorAll(".block.peek")) peeked.classList.remove("peek");
  at("cell").textContent = "\u00a0";
  if (block === null || state.token === null || !arrays[layer.layer]) return;
  for (const part of inText(layer, block)) part.classList.add("peek");
  const [, range, ...rest] = block > ownOf(layer, state.token) ? [block, tokensOf(layer, block), "after the token"] : cells(layer, group, block);
  const named = rest.map((value, index) => (index === 1 ? `score ${value}` : index === 2 ? `dense twin ${value}` : value));
  at("cell").textContent = `block ${block}, tokens ${range}: ${named.join(", ")}`;
}

function fillTable(layer) {
  const isShown = at("numbers").open && state.token !== null && layer.num_blocks && arrays[layer.layer];
  at("numbers").hidden = !layer.num_blocks;
  if (!isShown) return at("table").replaceChildren();
  const titles = ["block", "tokens", "chosen", "score", ...(stripsOf(layer).includes("mass") ? ["dense twin"] : [])];
  const rows = [element("tr", {}, ...titles.map((title) => element("th", { scope: "col" }, title)))];
  for (let block = 0; block <= ownOf(layer, state.token); block++) {
    if (isChosen(layer, state.token, state.group, block)) {
      rows.push(element("tr", {}, ...cells(layer, state.group, block).map((cell) => element("td", {}, String(cell)))));
    }
  }
  return at("table").replaceChildren(...rows);
}

function headsOf(layer) {
  if (at("heads").checked) return [...Array(layer.num_heads).keys()].map((head) => [`head ${head}`, [head]]);
  const size = layer.num_heads / layer.num_kv_heads;
  return [...Array(layer.num_kv_heads).keys()].map((group) => [`KV head ${group}`, [...Array(size).keys()].map((head) => group * size + head)]);
}

function buildGates(layer) {
  meters = [];
  const table = at("gates");
  table.replaceChildren();
  if (!layer.geometry) return;
  table.append(element("tr", {}, element("th"), ...layer.branches.map((branch) => element("th", { scope: "col" }, branch))));
  for (const [name, heads] of headsOf(layer)) {
    const row = element("tr", {}, element("th", { scope: "row" }, name));
    for (const branch of layer.branches) {
      const bar = element("i");
      const value = element("b", { style: "font-weight: 400" }, "\u2013");
      bar.style.width = "0";
      meters.push({ bar, value, heads, branch });
      row.append(element("td", {}, element("div", { className: "meter" }, element("span", {}, bar), value)));
    }
    table.append(row);
  }
}

function fillGates(layer) {
  for (const { bar, value, heads, branch } of meters) {
    const mean = heads.reduce((sum, head) => sum + gateOf(layer, state.token, head, branch), 0) / heads.length;
    bar.style.width = percent(mean).replace(" ", "");
    value.textContent = mean.toFixed(2);
  }
}

function plot(caption, counts, [least, largest], describe) {
  const most = Math.max(...counts, 1);
  const total = counts.reduce((sum, count) => sum + count, 0);
  const bars = counts.map((count, index) => {
    const bar = element("i", { title: `${describe(index)}: ${count.toLocaleString("en")} (${percent(total ? count / total : 0)})` });
    bar.style.height = `${(100 * count) / most}%`;
    return bar;
  });
  const label = `${caption}: ${bars.filter((bar, index) => counts[index]).map((bar) => bar.title).join("; ") || "none"}`;
  const shown = element("div", { className: "bars" }, ...bars);
  shown.setAttribute("role", "img");
  shown.setAttribute("aria-label", label);
  const ends = element("div", { className: "ends" }, element("span", {}, least), element("span", {}, largest));
  return element("figure", {}, element("figcaption", {}, caption), shown, ends);
}

const sums = (rows) => (rows.length ? rows[0].map((_, index) => rows.reduce((sum, row) => sum + row[index], 0)) : []);

function fillHistograms(layer) {
  const shown = at("every").checked ? layers.filter((one) => one.geometry) : layer.geometry ? [layer] : [];
  const plots = BRANCHES.filter((branch) => shown.some((one) => one.gate_histogram[branch])).map((branch) => {
    const counts = sums(shown.map((one) => one.gate_histogram[branch]).filter(Boolean));
    const bin = (index) => `${branch} gate ${(index / counts.length).toFixed(2)} to ${((index + 1) / counts.length).toFixed(2)}`;
    return plot(`${branch} gates, heads and tokens`, counts, ["0", "1"], bin);
  });
  const longest = shown.map((one) => one.distance_histogram).reduce((a, b) => (b.length > a.length ? b : a), []);
  if (longest.length) {
    const counts = longest.map((_, index) => shown.reduce((sum, one) => sum + (one.distance_histogram[index]?.blocks || 0), 0));
    const bin = ({ first, last }) => (first === last ? `${first}` : `${first} to ${last}`);
    const ends = [bin(longest[0]), bin(longest[longest.length - 1])];
    plots.push(plot("distance of blocks chosen by score, in blocks", counts, ends, (index) => `${bin(longest[index])} blocks before`));
  }
  const note = !plots.length
    ? "A dense layer has neither gates nor a choice."
    : longest.length
      ? "Distances double from bar to bar; 1 is the block before the token\u2019s own. They are of tokens with more blocks before them than a token may choose."
      : "No token chose a block by score: none has more blocks before it than a token may choose.";
  at("histograms").replaceChildren(element("div", { className: "plots" }, ...plots), element("p", { className: "note" }, note));
}

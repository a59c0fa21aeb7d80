// The facts of the page, its state, and the arrays of a layer, unpacked when they are shown. The next scripts build on it.
"use strict";

const BRANCHES = ["cmp", "slc", "win"];
const facts = JSON.parse(document.getElementById("facts").textContent);
const { layers, num_tokens: numTokens } = facts;
const at = (id) => document.getElementById(id);
const choosing = layers.filter((layer) => layer.num_blocks);
const arrays = layers.map(() => null);
const tokens = [];
const blocks = [];
const state = { token: null, layer: (choosing[0] || layers.find((layer) => layer.geometry)).layer, group: 0, pinned: false };
let lit = [];
let colors = {};

async function unpacked(layer, name) {
  const source = at(`layer${layer}-${name}`);
  if (!source) return null;
  const text = atob(source.textContent);
  const packed = new Uint8Array(text.length);
  for (let index = 0; index < text.length; index++) packed[index] = text.charCodeAt(index);
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

async function load(layer) {
  if (arrays[layer]) return;
  const found = {};
  // one after another, so that a pointer is answered in between
  for (const name of ["chosen", "scores", "mass", "gates"]) found[name] = await unpacked(layer, name);
  for (const name of ["scores", "mass"]) found[`${name}-largest`] = new Float32Array((await unpacked(layer, `${name}-largest`))?.buffer || 0);
  arrays[layer] = found;
  drawMap();
  if (layer === state.layer) showToken();
}

const widthOf = (layer) => layer.geometry.selection_block_size;
const ownOf = (layer, token) => Math.floor(token / widthOf(layer));

function isChosen(layer, token, group, block) {
  const bytes = Math.ceil(layer.num_blocks / 8);
  const row = (token * layer.num_kv_heads + group) * bytes;
  return (arrays[layer.layer].chosen[row + (block >> 3)] >> (block & 7)) & 1;
}

function isForced(layer, token, block) {
  const { num_initial_blocks: initial, num_local_blocks: local } = layer.geometry;
  return block < initial || block > ownOf(layer, token) - local;
}

// of the largest one; of each token there are the candidates 0 .. own alone, KV head after KV head
function shareOf(layer, name, token, group, block) {
  const own = ownOf(layer, token);
  const width = widthOf(layer);
  const before = (width * own * (own + 1)) / 2 + (token - own * width) * (own + 1);
  const level = arrays[layer.layer][name][before * layer.num_kv_heads + group * (own + 1) + block] / 255;
  return level * level;
}

function sharesOf(layer, name, token, group) {
  const shares = [];
  for (let block = 0; block <= ownOf(layer, token); block++) shares.push(shareOf(layer, name, token, group, block));
  return shares;
}

const largestOf = (layer, name, token, group) => arrays[layer.layer][`${name}-largest`][token * layer.num_kv_heads + group];

function gateOf(layer, token, head, branch) {
  return arrays[layer.layer].gates[(token * layer.num_heads + head) * 3 + BRANCHES.indexOf(branch)] / 255;
}

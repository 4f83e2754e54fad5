"use strict";
// What a report can do beyond being read: tables that are sorted and searched, curves of one client; and
// the page of a run that goes on loads itself again.
(() => {
  const read = (id) => JSON.parse(document.getElementById(id)?.textContent ?? "null");
  const make = (tag, text = "", attributes = {}) => {
    const element = document.createElement(tag);
    element.textContent = text;
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    return element;
  };

  // Numbers as report/page.py writes them, which rounds 0.25 to 0.2, too.
  const numbers = (options) => new Intl.NumberFormat("en-US", { useGrouping: false, roundingMode: "halfEven", ...options });
  const fixed = (digits) => numbers({ minimumFractionDigits: digits, maximumFractionDigits: digits });
  const three = numbers({ maximumSignificantDigits: 3 });
  const size = (count) => {
    const units = ["bytes", "kB", "MB", "GB", "TB"];
    while (count >= 999.5 && units.length > 1) { count /= 1000; units.shift(); }
    return `${three.format(count)} ${units[0]}`;
  };
  const decimals = { bar: fixed(1), score: fixed(1), loss: fixed(3), count: fixed(0) };
  const cell = (value, kind) => (value === null ? "–" : kind === "bytes" ? size(value) : decimals[kind].format(value));

  const PAGE = 200;  // rows at a time
  function sortable(place, chosen) {
    const { columns, rows } = read(place.dataset.rows);
    const body = place.querySelector("tbody"), heads = [...place.querySelectorAll("thead th")];
    const search = place.querySelector("input"), said = place.querySelector("output");
    const [previous, next] = place.querySelectorAll(".tools button");
    const names = new Intl.Collator(undefined, { numeric: true });
    let order = rows, first = 0;
    const draw = () => {
      body.replaceChildren(...order.slice(first, first + PAGE).map((row) => {
        const line = make("tr"), head = make("th", "", { scope: "row", title: row[0] });
        head.append(chosen ? chosen(row[0]) : row[0]);
        line.append(head, ...columns.map(([, kind, wide], number) => {
          const value = row[number + 1], classes = [wide ? "wide" : "", kind === "bar" && value !== null ? "score" : ""];
          const data = make("td", cell(value, kind), { class: classes.filter(Boolean).join(" ") });
          if (classes[1]) data.style.setProperty("--share", value);
          return data;
        }));
        return line;
      }));
      const last = Math.min(first + PAGE, order.length), of = order.length < rows.length ? ` found of ${rows.length}` : "";
      said.textContent = `${order.length ? first + 1 : 0}–${last} of ${order.length}${of}`;
      [previous.disabled, next.disabled] = [first === 0, last === order.length];
      previous.hidden = next.hidden = order.length <= PAGE;
    };
    const arrange = () => {
      const wanted = search.value.trim().toLowerCase(), head = heads.find((each) => each.ariaSort !== "none");
      order = rows.filter((row) => row[0].toLowerCase().includes(wanted));
      if (head) {
        const number = heads.indexOf(head), sign = head.ariaSort === "ascending" ? 1 : -1;
        order.sort(({ [number]: one }, { [number]: other }) => {
          if (one === null || other === null) return (one === null) - (other === null);  // what is unknown comes last
          return sign * (number ? one - other : names.compare(one, other));
        });
      }
      first = 0;
      draw();
    };
    for (const head of heads) {
      const button = make("button", head.textContent, { type: "button" });
      head.replaceChildren(button);
      head.ariaSort = "none";
      button.addEventListener("click", () => {
        const turned = head.ariaSort === "ascending" ? "descending" : "ascending";
        for (const each of heads) each.ariaSort = each === head ? turned : "none";
        arrange();
      });
    }
    search.addEventListener("input", arrange);
    const turn = (by) => { first += by; draw(); place.querySelector(".scroll").scrollTop = 0; };
    previous.addEventListener("click", () => turn(-PAGE));
    next.addEventListener("click", () => turn(PAGE));
    place.querySelector(".tools").hidden = false;
    place.querySelector(".static")?.remove();
    draw();
  }

  function plot(title, [rounds, values]) {
    const [width, height, left, top, right, bottom] = [360, 180, 62, 10, 350, 156];
    const [from, to] = [rounds[0], rounds[rounds.length - 1]], low = Math.min(...values), high = Math.max(...values);
    const x = (round) => (to > from ? left + ((right - left) * (round - from)) / (to - from) : (left + right) / 2);
    const y = (value) => (high > low ? bottom - ((bottom - top) * (value - low)) / (high - low) : (top + bottom) / 2);
    const points = rounds.map((round, i) => [x(round).toFixed(1), y(values[i]).toFixed(1)]);
    const dots = points.length > 60 ? "" : points.map(([a, b]) => `<circle cx="${a}" cy="${b}" r="2.5"/>`).join("");
    const labels = [...new Set([high, low])].map((value) =>
      `<text x="${left - 6}" y="${y(value) + 4}" text-anchor="end">${three.format(value)}</text>`);
    const ends = [...new Set([from, to])].map((round) =>
      `<text x="${x(round)}" y="${height - 8}" text-anchor="${to > from && round === to ? "end" : "middle"}">${round}</text>`);
    const figure = make("div"), name = make("div", title, { class: "soft" });
    figure.innerHTML = `<svg viewBox="0 0 ${width} ${height}" role="img"><line x1="${left}" y1="${bottom + 4}" x2="${right}" y2="${bottom + 4}"/>` +
      `<polyline points="${points.map((point) => point.join()).join(" ")}"/>${dots}${labels.join("")}${ends.join("")}</svg>`;
    figure.firstChild.setAttribute("aria-label", `${title} by round: from ${three.format(values[0])} to ${three.format(values[values.length - 1])}`);
    figure.prepend(name);
    return figure;
  }

  const curves = read("curves"), panel = document.getElementById("one");
  let client = null;
  const chosen = curves && ((name) => {
    if (!Object.hasOwn(curves.clients, name)) return name;
    const button = make("button", name, { type: "button", "aria-pressed": name === client });
    button.addEventListener("click", () => {
      client = name;
      for (const each of document.querySelectorAll("tbody button")) each.ariaPressed = String(each === button);
      const { score, loss } = curves.clients[name], found = [];
      if (score) found.push(plot(curves.score, score));
      if (loss) found.push(plot("training loss", loss));
      panel.querySelector("h3").textContent = name;
      panel.querySelector(".curves").replaceChildren(...found);
      panel.hidden = false;
    });
    return button;
  });
  for (const hint of document.querySelectorAll(".script")) hint.hidden = false;
  for (const place of document.querySelectorAll("[data-rows]")) sortable(place, place.id === "clients" ? chosen : null);
})();

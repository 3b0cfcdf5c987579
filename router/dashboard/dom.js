// Small ways to make elements. Whatever comes from the network becomes text, never markup.

/** el("td", { class: "num" }, "text", child, ...): strings become text nodes. */
export function el(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value == null || value === false) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else element.setAttribute(key, value === true ? "" : String(value));
  }
  for (const child of children) {
    if (child != null) element.append(child instanceof Node ? child : String(child));
  }
  return element;
}

export const byId = (id) => document.getElementById(id);

/** Set text only where it is another one: what does not change is not laid out again. */
export function setText(element, text) {
  const value = String(text);
  if (element.textContent !== value) element.textContent = value;
}

export function setAttribute(element, name, value) {
  if (value == null) {
    if (element.hasAttribute(name)) element.removeAttribute(name);
  } else if (element.getAttribute(name) !== String(value)) {
    element.setAttribute(name, value);
  }
}

/** Let the children of parent be these elements in this order, moving as few as possible. */
export function arrange(parent, elements) {
  const wanted = new Set(elements);
  for (const child of [...parent.children]) {
    if (!wanted.has(child)) child.remove();
  }
  const focused = parent.contains(document.activeElement) ? document.activeElement : null;
  let at = parent.firstElementChild;
  for (const element of elements) {
    if (element === at) at = at.nextElementSibling;
    else parent.insertBefore(element, at);
  }
  if (focused && document.activeElement !== focused && parent.contains(focused)) {
    focused.focus({ preventScroll: true });
  }
}

/** A list of elements by key, made once each and updated after that. */
export class Keyed {
  constructor(parent, make, update) {
    this.parent = parent;
    this.make = make;
    this.update = update;
    this.kept = new Map();
  }

  show(items) {
    const kept = new Map();
    const elements = items.map(([key, item]) => {
      const element = this.kept.get(key) ?? this.make(item, key);
      this.update(element, item);
      kept.set(key, element);
      return element;
    });
    this.kept = kept;
    arrange(this.parent, elements);
  }
}

// Keeps conversations in the browser. IndexedDB, because images are longer than localStorage takes.

const NAME = "paged-sdk-chat";
const TABLE = "conversations";

export class Store {
  static async open() {
    const asked = indexedDB.open(NAME, 1);
    asked.onupgradeneeded = () => asked.result.createObjectStore(TABLE, { keyPath: "id" });
    return new Store(await done(asked));
  }

  constructor(database) {
    this.database = database;
  }

  async all() {
    const found = await done(this.#table("readonly").getAll());
    return found.sort((one, other) => other.changed - one.changed);
  }

  put(conversation) {
    return done(this.#table("readwrite").put(conversation));
  }

  remove(id) {
    return done(this.#table("readwrite").delete(id));
  }

  #table(mode) {
    return this.database.transaction(TABLE, mode).objectStore(TABLE);
  }
}

// Stands in where the browser keeps nothing, in private windows of some: conversations last as long as the page.
export class Forgetful {
  #kept = new Map();

  async all() {
    return [...this.#kept.values()];
  }

  async put(conversation) {
    this.#kept.set(conversation.id, conversation);
  }

  async remove(id) {
    this.#kept.delete(id);
  }
}

function done(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

// What a token attended to.

export async function attend() {
  throw new Error("not yet");
}

/* NeuMF's training step on the GPU for the published widths: how the model of train_ncf.cu uses ops/ncf_fused.cuh.
 * Included by train_ncf.cu once its model is defined. */
#ifndef DEV_RECSYS_NCF_FUSED_STEP_CUH
#define DEV_RECSYS_NCF_FUSED_STEP_CUH

static int fused_supports(const Config* c) {
    return c->F == NCF_F && c->E == NCF_E && c->mlp.count == 3 && c->mlp.width[1] == NCF_H0 &&
           c->mlp.width[2] == NCF_H1 && c->mlp.width[3] == NCF_H2;
}

// What the fused step needs besides: dz0 is the first layer's dz.
static void fused_plan(Model* m, TensorTable* acts, TensorTable* stats) {
    const int rows[2] = {m->config.users, m->config.items};
    for (int i = 0; i < 2; i++) {
        size_t field = (size_t)i * sizeof(floatX*);
        rows_add(acts, offsetof(Acts, products) + field, rows[i], NCF_H0, OWN, i ? "item_products" : "user_products");
        rows_add(acts, offsetof(Acts, sums) + field, rows[i], NCF_H0, OWN, i ? "item_sums" : "user_sums");
        rows_add(acts, offsetof(Acts, dmlp) + field, rows[i], NCF_E, OWN, i ? "dmlp_item" : "dmlp_user");
        rows_add(stats, offsetof(Acts, dmf) + field, rows[i], NCF_F, OWN, i ? "dmf_item_rows" : "dmf_user_rows");
    }
    rows_add(stats, offsetof(Acts, dlogits), m->B, 0, OWN, "dlogits");
    rows_add(stats, offsetof(Acts, partial), NCF_THREADS, NCF_PARTIAL, OWN, "partial");  // blocks: one for each SM
    rows_add(stats, offsetof(Acts, row_partial), NCF_THREADS * NCF_ROW_BLOCKS, NCF_ROW_PARTIAL, OWN, "row_partial");
    rows_add(stats, offsetof(Acts, partial_loss), NCF_THREADS, 2, OWN, "partial_loss");  // doubles
}

static void train_fused(Model* m, Optimizer* o, const Batch* in, uint64_t step, OptimizerSettings h, Context* ctx) {
    const Config* c = &m->config;
    const Linear* p = m->p.mlp;
    const LinearGrads* g = m->g.mlp;
    ModelBuffers* b = &m->buffers;
    const int rows[2] = {c->users, c->items};
    const floatX* mlp[2] = {m->p.tables[MLP_USER], m->p.tables[MLP_ITEM]};
    NcfStep s = {m->a.products[0], m->a.products[1], m->p.tables[MF_USER], m->p.tables[MF_ITEM]};
    s.b0 = p[0].b, s.w1 = p[1].w, s.b1 = p[1].b, s.w2 = p[2].w, s.b2 = p[2].b, s.w3 = m->p.last.w, s.b3 = m->p.last.b;
    s.users = in->users, s.items = in->items, s.labels = in->labels, s.B = in->B, s.scale = 1.0f / in->B;
    s.dz0 = m->a.mlp.dz[0], s.dlogits = m->a.dlogits, s.partial = m->a.partial, s.row_partial = m->a.row_partial;
    s.partial_loss = (double*)m->a.partial_loss;
    dropouts(s.dropout, m, step, in->first, c->dropout);

    for (int i = 0; i < 2; i++) {
        NcfMatrix table = {mlp[i], NCF_E, CUBLAS_OP_N}, w0 = {p[0].w + i * NCF_E, NCF_H0, CUBLAS_OP_T};
        BatchSize size = {rows[i], NCF_H0, NCF_E, 1};
        ncf_matmul(m->a.products[i], NCF_H0, 0, table, w0, size, ctx);
    }
    ncf_step(s, ctx);
    scope_at(ctx, BACKWARD, -1);
    NcfRows user = {m->users, in->items, s.mf_user, s.mf_item, m->a.sums[0], m->a.dmf[0]};
    NcfRows item = {m->items, in->users, s.mf_item, s.mf_user, m->a.sums[1], m->a.dmf[1]};
    row_segments_wait(&m->users, ctx), row_segments_wait(&m->items, ctx);
    ncf_rows(s, user, item, ctx);
    for (int i = 0; i < 2; i++) {
        NcfMatrix sums = {m->a.sums[i], NCF_H0, CUBLAS_OP_N}, transposed = {m->a.sums[i], NCF_H0, CUBLAS_OP_T};
        NcfMatrix table = {mlp[i], NCF_E, CUBLAS_OP_N}, w0 = {p[0].w + i * NCF_E, NCF_H0, CUBLAS_OP_N};
        BatchSize of_rows = {rows[i], NCF_E, NCF_H0, 1}, of_weights = {NCF_H0, NCF_E, rows[i], 1};
        ncf_matmul(m->a.dmlp[i], NCF_E, 0, sums, w0, of_rows, ctx);
        ncf_matmul(g[0].w + i * NCF_E, NCF_H0, 1, transposed, table, of_weights, ctx);
    }
    NcfSums sums = {g[0].b, g[1].w, g[1].b, g[2].w, g[2].b, m->g.last.w, m->g.last.b, m->a.loss};
    ncf_reduce(sums, s, ctx);
    AdamWState state = {b->params, o->master, o->m, o->v, b->grads, o->step, 0};
    recommender_norm(b, o, m->elements, h, ctx);
    adamw_update(state, m->elements, m->span, 1, h, ctx);
    NcfAdamJobs jobs;
    memset(&jobs, 0, sizeof jobs);
    for (int t = 0; t < NCF_TABLES; t++) {
        int i = t % 2, is_mlp = t >= MLP_USER, E = is_mlp ? c->E : c->F;
        NcfAdamJob job = {recommender_table(b, o, (size_t)(m->p.tables[t] - b->params), E), is_mlp ? NULL : m->a.dmf[i],
                          is_mlp ? m->a.dmlp[i] : NULL, (size_t)rows[i] * (size_t)E};
        jobs.job[t] = job;
    }
    ncf_adam(jobs, h, o->step, ctx);
}

#endif
